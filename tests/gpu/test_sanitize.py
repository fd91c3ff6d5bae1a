"""compute-sanitizer finds nothing in the kernels (class of MoonshotAI/FlashKDA#24, #25)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("sanitize.sh")


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_sanitizer_is_clean(tool: str) -> None:
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("compute-sanitizer is not on the PATH")
    done = subprocess.run(
        ["bash", str(SCRIPT)],
        env={**os.environ, "TOOLS": tool, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "passed" in done.stdout, "no test was selected"
