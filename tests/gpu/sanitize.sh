#!/usr/bin/env bash
# compute-sanitizer over this project's kernels, on calls small enough for it.
#
#   bash tests/gpu/sanitize.sh               through the installed Python package
#   bash tests/gpu/sanitize.sh PROGRAM...    through GoogleTest programs of tests/gpu/cpp
#
# TOOLS: the tools to run, all four by default. FILTER: a pytest -k expression, or a GoogleTest
# filter when programs are given. PYTHON: the interpreter.
set -euo pipefail
cd "$(dirname "$0")/../.."

command -v compute-sanitizer >/dev/null || {
  echo "tests/gpu/sanitize.sh: compute-sanitizer is not on the PATH; it comes with the CUDA toolkit" >&2
  exit 2
}
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
tools=${TOOLS:-memcheck racecheck initcheck synccheck}

# Tails, empty and single-token sequences, unused rows, both state dtypes; a few chunks each.
python_filter=${FILTER:-test_case and not packed and (one-token or past-block or past-chunk or tail \
or empties or single-tokens or skewed or unused-rows)}
program_filter=${FILTER:-*Tails*:*Lengths*:*StateTypes*:*Empty*:*NoTokens*:*InPlace*:*Malformed*}

failed=()
check() { # tool, command...
  local tool=$1
  shift
  echo "=== $tool: $*"
  # Kernels of torch are not this project's to check. Without torch's caching every tensor is an
  # allocation of its own, whose bounds the tools know.
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$tool" --error-exitcode 1 \
    --kernel-name kernel_substring=flash_kda "$@" || failed+=("$tool")
}

for tool in $tools; do
  if [ $# -eq 0 ]; then
    check "$tool" "$python" -m pytest -q -p no:cacheprovider -m cuda -k "$python_filter" \
      tests/python/test_cases.py
  fi
  for program in "$@"; do
    check "$tool" "$program" --gtest_filter="$program_filter"
  done
done

if [ ${#failed[@]} -gt 0 ]; then
  echo "errors found by: ${failed[*]}" >&2
  exit 1
fi
echo "clean: $tools"
