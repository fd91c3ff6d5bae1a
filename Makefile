# make demo   streams a text through the operator on this machine
# make test   builds and runs all tests that this machine can run
# make lint   checks formatting and style
#
# Each target makes .venv, installs from PyPI what it needs, builds and runs. The builds are for the
# visible GPU, or CPU-only without one; FLASH_KDA_CUDA_ARCHS=... in the environment overrides that.

PYTHON ?= python3
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
export PATH := $(BIN):$(PATH)

ifeq ($(strip $(FLASH_KDA_CUDA_ARCHS)),)
FLASH_KDA_CUDA_ARCHS := $(shell [ -n "$${CUDA_VISIBLE_DEVICES-all}" ] && \
  nvidia-smi -L 2>/dev/null | grep -q GPU && echo auto || echo none)
endif
export FLASH_KDA_CUDA_ARCHS

CPP_SOURCES = $(shell find include src python/binding tests benchmarks cmake -type f \
  \( -name '*.h' -o -name '*.c' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh' \))

.PHONY: demo test test-cpp test-sanitized test-python install lint format clean

demo: install
	$(BIN)/python -m flash_kda demo

test: test-cpp test-sanitized test-python

# The wheel of this tree, in .venv. The build folder stays, so that a second build is quick.
install: $(VENV)/.build-ready
	$(PIP) install --no-build-isolation --no-deps --force-reinstall \
	  --config-settings=build-dir=build/wheel .

test-cpp: $(VENV)/.build-ready
	cmake -S . -B build/cpp -G Ninja -DFLASH_KDA_BUILD_TESTS=ON -DFLASH_KDA_WERROR=ON
	cmake --build build/cpp
	ctest --test-dir build/cpp --output-on-failure

# The CPU tests under the address and undefined-behaviour sanitizers.
test-sanitized: $(VENV)/.build-ready
	cmake -S . -B build/sanitized -G Ninja -DFLASH_KDA_BUILD_TESTS=ON -DFLASH_KDA_SANITIZE=ON \
	  -DFLASH_KDA_CUDA_ARCHS=none
	cmake --build build/sanitized
	ctest --test-dir build/sanitized --output-on-failure

test-python: install $(VENV)/.test-ready
	$(BIN)/python -m pytest

lint: $(VENV)/.lint-ready
	$(BIN)/clang-format --dry-run -Werror $(CPP_SOURCES)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.lint-ready
	$(BIN)/clang-format -i $(CPP_SOURCES)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; \
	  sys.exit(sys.version_info < (3, 10) and "expected Python >= 3.10, got " + v + \
	  "; name another with make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade "pip>=25.1"
	touch $@

# .build-ready, .test-ready, .lint-ready: the dependency groups of pyproject.toml.
$(VENV)/.build-ready: $(VENV)/.made pyproject.toml
	$(PIP) install --quiet --group build --group demo
	touch $@

$(VENV)/.%-ready: $(VENV)/.made pyproject.toml
	$(PIP) install --quiet --group $*
	touch $@

clean:
	rm -rf build dist $(VENV)
