"""The build: which architectures, how many jobs, whose headers, and what a wheel contains."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from flash_kda import _ctypes

ROOT = Path(__file__).resolve().parents[2]
SUPPORTED = "80, 90a, 100a, 103a, 120a"

if not (ROOT / "cmake" / "Archs.cmake").exists():
    pytest.skip("the source tree is not here", allow_module_level=True)


def run_cmake(*arguments, cwd, **environment):
    """Runs cmake and returns (exit status, all output). None for a variable unsets it."""
    path = os.pathsep.join([str(Path(sys.prefix) / "bin"), os.environ["PATH"]])
    cmake = shutil.which("cmake", path=path)
    if cmake is None:
        pytest.skip("cmake is not installed")
    ours = ("FLASH_KDA_CUDA_ARCHS", "FLASH_KDA_CUTLASS_DIR", "NVCC_THREADS", "MAX_JOBS", "CUDACXX")
    env = {n: v for n, v in os.environ.items() if n not in ours} | {"PATH": path}
    env |= {n: v for n, v in environment.items() if v is not None}
    result = subprocess.run(
        [cmake, *map(str, arguments)],
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return result.returncode, result.stdout


def find_in_toolkit(name):
    return shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")


@pytest.fixture
def nvcc(tmp_path):
    """A stand-in that knows only its version."""

    def make(release="13.0"):
        path = tmp_path / f"nvcc-{release}"
        path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}'")
        path.chmod(0o755)
        return str(path)

    return make


@pytest.fixture
def configure(tmp_path):
    """Configures a project that includes one module and shows what the modules set."""

    def run(*arguments, module="Archs", body="", **environment):
        (tmp_path / "CMakeLists.txt").write_text(
            "cmake_minimum_required(VERSION 3.25)\n"
            "project(probe LANGUAGES CXX)\n"
            f"list(APPEND CMAKE_MODULE_PATH {ROOT}/cmake)\n"
            f"include({module})\n"
            'message(STATUS "archs [${FLASH_KDA_ARCHS}] jobs [${FLASH_KDA_JOBS}] '
            'threads [${FLASH_KDA_NVCC_THREADS}] cutlass [${FLASH_KDA_CUTLASS_INCLUDE}]")\n' + body
        )
        shutil.rmtree(tmp_path / "build", ignore_errors=True)
        return run_cmake("-B", tmp_path / "build", *arguments, cwd=tmp_path, **environment)

    return run


# --- architectures -----------------------------------------------------------------------------


def call_function(tmp_path, function, text):
    script = tmp_path / "script.cmake"
    script.write_text(
        "cmake_minimum_required(VERSION 3.25)\n"
        f"list(APPEND CMAKE_MODULE_PATH {ROOT}/cmake)\n"
        f'include(Archs)\n{function}("{text}" archs)\n'
        'message("archs [${archs}]")'
    )
    return run_cmake("-P", script, cwd=tmp_path)


@pytest.mark.parametrize(
    ("text", "archs"),
    [
        ("80", "80"),
        ("90a", "90a"),
        ("9.0a", "90a"),
        ("9.0", "90a"),
        ("90", "90a"),
        ("8.0,9.0a", "80;90a"),
        (" 120a ,  80 ", "80;120a"),
        ("103a 100a\t90A", "90a;100a;103a"),
        ("sm_90a,sm_100a", "90a;100a"),
        ("80,8.0,80", "80"),
        ("80,", "80"),
    ],
)
def test_arch_list(tmp_path, text, archs):
    status, output = call_function(tmp_path, "flash_kda_parse_arch_list", text)
    assert status == 0, output
    assert f"archs [{archs}]" in output


@pytest.mark.parametrize("text", ["75", "80,91a", "native", "80a", "9", "-80"])
def test_unknown_arch_is_answered_with_the_supported_ones(tmp_path, text):
    status, output = call_function(tmp_path, "flash_kda_parse_arch_list", text)
    assert status != 0
    words = " ".join(output.split())
    assert f"expected auto, all, none or a list of {SUPPORTED}; got" in words
    assert f'"{text}"' in words


@pytest.mark.parametrize(
    ("devices", "archs"),
    [("8.0", "80"), ("8.6;8.9", "80"), ("9.0", "90a"), ("12.0;9.0;9.0", "90a;120a")],
)
def test_archs_of_visible_devices(tmp_path, devices, archs):
    status, output = call_function(tmp_path, "flash_kda_archs_of_devices", devices)
    assert status == 0, output
    assert f"archs [{archs}]" in output


def test_visible_device_that_nothing_runs_on(tmp_path):
    status, output = call_function(tmp_path, "flash_kda_archs_of_devices", "9.0;7.5")
    assert status != 0
    words = " ".join(output.split())
    assert f"compute capability 7.5; expected one that runs code for {SUPPORTED}" in words


def test_auto_without_a_visible_device(configure, nvcc):
    for request in ({}, {"FLASH_KDA_CUDA_ARCHS": "auto"}, {"FLASH_KDA_CUDA_ARCHS": " AUTO "}):
        status, output = configure(CUDACXX=nvcc(), CUDA_VISIBLE_DEVICES="", **request)
        assert status != 0
        assert (
            "FLASH_KDA_CUDA_ARCHS=auto requires a visible CUDA device. "
            "Set FLASH_KDA_CUDA_ARCHS=all to build all supported archs." in output
        )


def test_auto_without_nvcc_is_loudly_cpu_only(configure):
    status, output = configure(CUDACXX="", CUDA_VISIBLE_DEVICES="")
    assert status == 0, output
    assert "CMake Warning" in output and "CPU-ONLY BUILD: no nvcc found" in output
    assert "(visible CUDA devices: none)" in " ".join(output.split())
    assert "archs []" in output


@pytest.mark.parametrize(
    ("request_", "archs"), [("all", "80;90a;100a;103a;120a"), ("none", ""), ("8.0, 90a", "80;90a")]
)
def test_requests(configure, nvcc, request_, archs):
    status, output = configure(CUDACXX=nvcc(), FLASH_KDA_CUDA_ARCHS=request_)
    assert status == 0, output
    assert f"archs [{archs}]" in output


def test_cmake_variable_beats_the_environment(configure, nvcc):
    status, output = configure(
        "-DFLASH_KDA_CUDA_ARCHS=90a", CUDACXX=nvcc(), FLASH_KDA_CUDA_ARCHS="none"
    )
    assert status == 0, output
    assert "archs [90a]" in output


def test_archs_without_nvcc(configure):
    status, output = configure(CUDACXX="", FLASH_KDA_CUDA_ARCHS="90a")
    assert status != 0
    assert "FLASH_KDA_CUDA_ARCHS=90a needs nvcc >= 12.9, none found" in " ".join(output.split())


def test_old_nvcc_is_named_with_the_required_version(configure, nvcc):
    status, output = configure(CUDACXX=nvcc("12.4"), FLASH_KDA_CUDA_ARCHS="all")
    assert status != 0
    assert "expected nvcc >= 12.9, found 12.4" in " ".join(output.split())
    status, output = configure(CUDACXX=nvcc("12.9"), FLASH_KDA_CUDA_ARCHS="all")
    assert status == 0, output


@pytest.mark.parametrize(
    ("gpus", "environment", "archs"),
    [
        ("GPU 0: NVIDIA H200", {}, "auto"),
        ("GPU 0: NVIDIA H200", {"CUDA_VISIBLE_DEVICES": ""}, "none"),
        ("No devices were found", {}, "none"),
        (None, {}, "none"),
        (None, {"FLASH_KDA_CUDA_ARCHS": "all"}, "all"),
        ("GPU 0: NVIDIA H200", {"FLASH_KDA_CUDA_ARCHS": "none"}, "none"),
    ],
)
def test_make_builds_for_the_visible_gpu(tmp_path, gpus, environment, archs):
    """CPU-only without one; the variable overrides that."""
    if (make := shutil.which("make")) is None:
        pytest.skip("make is not installed")
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\n" + (f"echo '{gpus}'" if gpus else "exit 9"))
    tool.chmod(0o755)
    ours = ("FLASH_KDA_CUDA_ARCHS", "CUDA_VISIBLE_DEVICES", "MAKEFLAGS")
    env = {n: v for n, v in os.environ.items() if n not in ours} | environment
    shown = subprocess.run(
        [make, "-s", "--eval", "shown: ; @echo $(FLASH_KDA_CUDA_ARCHS)", "shown"],
        cwd=ROOT,
        env=env | {"PATH": f"{tmp_path}:{env['PATH']}"},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert shown.strip() == archs


# --- jobs ----------------------------------------------------------------------------------------


def test_jobs_are_bounded_by_the_cores(configure, nvcc):
    status, output = configure(CUDACXX=nvcc(), FLASH_KDA_CUDA_ARCHS="all")
    assert status == 0, output
    jobs, threads = map(int, re.search(r"jobs \[(\d+)\] threads \[(\d+)\]", output).groups())
    assert 1 <= jobs * threads <= max(1, len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    ("cores", "gib", "most"), [(128, 16, 6), (128, 2, 1), (2, 24, 2), (64, 1024, 64)]
)
def test_jobs_fit_into_the_memory(configure, nvcc, tmp_path, cores, gib, most):
    """At 2.5 GiB for each compiler, whatever the number of cores."""
    status, output = configure(
        CUDACXX=nvcc(),
        FLASH_KDA_CUDA_ARCHS="all",
        body=f"function(flash_kda_cores out)\n  set(${{out}} {cores} PARENT_SCOPE)\nendfunction()\n"
        "function(flash_kda_memory_mib out)\n"
        f"  set(${{out}} {gib * 1024} PARENT_SCOPE)\nendfunction()\n"
        "flash_kda_plan_jobs(jobs threads)\n"
        'message(STATUS "planned [${jobs}] [${threads}]")\n',
    )
    assert status == 0, output
    jobs, threads = map(int, re.search(r"planned \[(\d+)\] \[(\d+)\]", output).groups())
    assert most // 2 < jobs * threads <= most


def test_jobs_and_threads_are_honoured(configure, nvcc):
    status, output = configure(
        CUDACXX=nvcc(), FLASH_KDA_CUDA_ARCHS="all", MAX_JOBS="3", NVCC_THREADS="5"
    )
    assert status == 0, output
    assert "jobs [3] threads [5]" in output


@pytest.mark.parametrize("variable", ["MAX_JOBS", "NVCC_THREADS"])
def test_wrong_job_counts_are_refused(configure, variable):
    status, output = configure(FLASH_KDA_CUDA_ARCHS="none", **{variable: "many"})
    assert status != 0
    assert f'{variable}: expected a positive integer, got "many"' in output


# --- headers -------------------------------------------------------------------------------------


def make_cutlass(folder, version=(4, 2, 0), code=""):
    """A folder that looks like CUTLASS."""
    (folder / "include" / "cute").mkdir(parents=True)
    (folder / "include" / "cutlass").mkdir()
    (folder / "include" / "cute" / "tensor.hpp").write_text(code)
    (folder / "include" / "cutlass" / "version.h").write_text(
        "".join(
            f"#define CUTLASS_{part} {n}\n"
            for part, n in zip(("MAJOR", "MINOR", "PATCH"), version, strict=True)
        )
    )
    return folder


NO_PACKAGE = "-DCMAKE_DISABLE_FIND_PACKAGE_NvidiaCutlass=ON"


@pytest.mark.parametrize("inner", ["", "include"])
def test_given_cutlass_is_used(configure, tmp_path, inner):
    folder = make_cutlass(tmp_path / "cutlass") / inner
    for way in (
        {"arguments": [f"-DFLASH_KDA_CUTLASS_DIR={folder}"], "environment": {}},
        {"arguments": [], "environment": {"FLASH_KDA_CUTLASS_DIR": str(folder)}},
    ):
        status, output = configure(*way["arguments"], module="FindCutlass", **way["environment"])
        assert status == 0, output
        assert f"cutlass [{tmp_path}/cutlass/include]" in output


def test_cutlass_of_a_cmake_package_comes_before_that_of_python(configure, tmp_path):
    include = make_cutlass(tmp_path / "installed") / "include"
    package = tmp_path / "NvidiaCutlassConfig.cmake"
    package.write_text(
        "add_library(nvidia::cutlass::cutlass INTERFACE IMPORTED)\n"
        f"target_include_directories(nvidia::cutlass::cutlass INTERFACE {include})\n"
    )
    wheel = make_cutlass(tmp_path / "site" / "cutlass_library" / "source") / "include"
    environment = {"module": "FindCutlass", "PYTHONPATH": str(tmp_path / "site")}
    python = f"-DPython_EXECUTABLE={sys.executable}"
    status, output = configure(python, f"-DNvidiaCutlass_DIR={tmp_path}", **environment)
    assert status == 0, output
    assert f"cutlass [{include}]" in output
    status, output = configure(python, NO_PACKAGE, **environment)
    assert status == 0, output
    assert f"cutlass [{wheel}]" in output


def test_given_folder_without_cutlass(configure, tmp_path):
    status, output = configure(f"-DFLASH_KDA_CUTLASS_DIR={tmp_path}", module="FindCutlass")
    assert status != 0
    assert "FLASH_KDA_CUTLASS_DIR: expected a folder with include/cute/tensor.hpp" in output


def test_old_cutlass_is_named_with_the_required_version(configure, tmp_path):
    folder = make_cutlass(tmp_path / "cutlass", version=(3, 5, 1))
    status, output = configure(f"-DFLASH_KDA_CUTLASS_DIR={folder}", module="FindCutlass")
    assert status != 0
    assert "CUTLASS: expected >= 4.2.0, found 3.5.1" in " ".join(output.split())


def test_other_cutlass_on_the_include_path_never_wins(configure, tmp_path):
    ours = make_cutlass(tmp_path / "ours", code="#define OURS 1\n")
    other = make_cutlass(tmp_path / "other", code='#error "the headers of another CUTLASS"\n')
    (tmp_path / "use.cc").write_text("#include <cute/tensor.hpp>\nstatic_assert(OURS == 1);\n")
    decoy = {n: str(other / "include") for n in ("CPATH", "CPLUS_INCLUDE_PATH")}
    status, output = configure(
        f"-DFLASH_KDA_CUTLASS_DIR={ours}",
        module="FindCutlass",
        body="add_library(use OBJECT use.cc)\ntarget_link_libraries(use PRIVATE flash_kda_cutlass)",
        **decoy,
    )
    assert status == 0, output
    status, output = run_cmake("--build", tmp_path / "build", cwd=tmp_path, **decoy)
    assert status == 0, output


def test_how_kernels_are_compiled(tmp_path):
    """CUTLASS's headers before those of the toolkit, whose folder can hold another CUTLASS as an
    environment of conda's does; as many compilers and threads as asked for."""
    if shutil.which("ninja") is None or find_in_toolkit("nvcc") is None:
        pytest.skip("ninja or nvcc is not installed")
    ours = make_cutlass(tmp_path / "cutlass") / "include"
    status, output = run_cmake(
        *("-G", "Ninja", "-S", ROOT, "-B", tmp_path / "build"),
        *("-DFLASH_KDA_CUDA_ARCHS=80,90a", f"-DFLASH_KDA_CUTLASS_DIR={ours}"),
        cwd=tmp_path,
        MAX_JOBS="3",
        NVCC_THREADS="2",
    )
    assert status == 0, output
    ninja = (tmp_path / "build" / "build.ninja").read_text()
    ninja += (tmp_path / "build" / "CMakeFiles" / "rules.ninja").read_text()
    assert re.search(r"pool flash_kda_compile\n +depth = 3\n", ninja)
    commands = json.loads((tmp_path / "build" / "compile_commands.json").read_text())
    kernels = [c["command"] for c in commands if c["file"].endswith(".cu")]
    assert kernels
    for command in kernels:  # what is given with -isystem comes after all of these
        folders = re.findall(r" -I *(\S+)", command)
        assert [f for f in folders if not f.startswith(f"{ROOT}/")] == [str(ours)]
        assert "--threads=2" in command
        assert re.search(r"compute_90a,code=\[?sm_90a", command)


def test_no_cutlass_and_no_network_is_said_at_once(configure):
    if any((Path(p) / "cutlass_library").exists() for p in sys.path):
        pytest.skip("this Python environment has CUTLASS")
    start = time.monotonic()
    status, output = configure(
        NO_PACKAGE,
        f"-DPython_EXECUTABLE={sys.executable}",
        module="FindCutlass",
        PIP_NO_INDEX="1",
        PIP_FIND_LINKS="/nowhere",
    )
    assert time.monotonic() - start < 10
    assert status != 0
    assert "CUTLASS headers not found. Set FLASH_KDA_CUTLASS_DIR" in " ".join(output.split())


def test_wheel_of_another_checksum_is_refused(configure, tmp_path):
    if any((Path(p) / "cutlass_library").exists() for p in sys.path):
        pytest.skip("this Python environment has CUTLASS")
    links = tmp_path / "links"
    links.mkdir()
    info = "nvidia_cutlass-4.2.0.0.dist-info"
    with zipfile.ZipFile(links / "nvidia_cutlass-4.2.0.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: nvidia-cutlass\nVersion: 4.2.0.0\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    status, output = configure(
        NO_PACKAGE,
        f"-DPython_EXECUTABLE={sys.executable}",
        module="FindCutlass",
        PIP_NO_INDEX="1",
        PIP_FIND_LINKS=str(links),
    )
    assert status != 0
    assert "expected SHA-256 f9599ada" in " ".join(output.split())


# --- what was built ----------------------------------------------------------------------------


def test_wheel_serves_every_python_3():
    tags = re.findall(r"^Tag: (.*)$", distribution("flash_kda").read_text("WHEEL"), re.MULTILINE)
    assert tags and all(re.fullmatch(r"py3-none-\w+", tag) for tag in tags)


def test_binding_alone_includes_torch():
    sources = [
        path
        for folder in ("include", "src", "python", "benchmarks")
        for suffix in ("h", "cc", "cu", "cuh")
        for path in (ROOT / folder).rglob(f"*.{suffix}")
    ]
    found = [
        path.name
        for path in sources
        if re.search(r"#\s*include\s*[<\"](torch|ATen|c10)/", path.read_text())
    ]
    assert found == ["torch_binding.cc"]


def test_built_archs_are_supported_ones():
    assert set(_ctypes.built_cuda_archs()) <= set(SUPPORTED.split(", "))


def find_cuobjdump():
    packaged = [
        path for folder in map(Path, sys.path) for path in folder.glob("nvidia/*/bin/cuobjdump")
    ]
    return find_in_toolkit("cuobjdump") or next(iter(map(str, packaged)), None)


@pytest.mark.slow
def test_wheel_contains_the_architectures_asked_for(tmp_path):
    """FLASH_KDA_TEST_WHEEL names a wheel, FLASH_KDA_TEST_WHEEL_ARCHS what it was built for."""
    wheel = os.environ.get("FLASH_KDA_TEST_WHEEL")
    if not wheel:
        pytest.skip("FLASH_KDA_TEST_WHEEL names no wheel")
    asked = os.environ["FLASH_KDA_TEST_WHEEL_ARCHS"]
    asked = {"all": SUPPORTED, "none": ""}.get(asked, asked)
    expected = {f"sm_{arch}" for arch in re.findall(r"\w+", asked)}
    with zipfile.ZipFile(wheel) as archive:
        archive.extract("flash_kda/libflash_kda.so", tmp_path)
        assert "flash_kda/_torch.so" in archive.namelist()
    found = set()
    if expected:
        cuobjdump = find_cuobjdump()
        assert cuobjdump, "cuobjdump is missing (the package nvidia-cuda-cuobjdump has it)"
        listing = subprocess.run(
            [cuobjdump, "--list-elf", tmp_path / "flash_kda" / "libflash_kda.so"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        found = set(re.findall(r"\.(sm_\w+)\.cubin", listing))
    assert found == expected
