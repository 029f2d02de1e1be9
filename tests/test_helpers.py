"""The threads that share the numbers of a large batch."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.emulated_only, pytest.mark.no_sanitizer]

ROOT = Path(__file__).parent.parent


def test_shared_work_is_done_once_and_seen(tmp_path: Path) -> None:
    """Under the thread sanitizer, which tells of a number that two threads had, or that the caller does not see."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler (c++)")
    program = tmp_path / "helpers"
    sources = [ROOT / "tests" / "native" / "helpers.cpp", ROOT / "_native" / "helpers.cpp"]
    command = [compiler, "-std=c++17", "-O1", "-pthread", "-I", ROOT / "_native", *sources, "-o", program]
    if subprocess.run([*command, "-fsanitize=thread"], capture_output=True, check=False).returncode != 0:
        subprocess.run(command, check=True)
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    done = subprocess.run([program], capture_output=True, text=True, check=False, timeout=120, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
