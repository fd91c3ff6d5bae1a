#!/usr/bin/env bash
# The correctness tests of this machine, with the GPU when there is one, against the installed
# package. Arguments go to pytest. `make test` builds first, and runs the C++ tests too.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
"$python" -c 'import flash_kda' || {
  echo "tests/test.sh: $python has no working flash_kda; run 'make install' or 'pip install .'" >&2
  exit 1
}
"$python" -m flash_kda doctor --no-fla || true
exec "$python" -m pytest tests/python tests/gpu --ignore=tests/python/test_build.py "$@"
