"""The native layer's threads by themselves: those that share the numbers of a large batch, and the workers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.emulated_only, pytest.mark.no_sanitizer]

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(("test", "tested"), [("helpers", "helpers"), ("workers", "staging")])
def test_shared_work_is_done_once_and_seen(tmp_path: Path, test: str, tested: str) -> None:
    """Under the thread sanitizer, which tells of what two threads had, or what is not seen by those who wait for it."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler (c++)")
    program = tmp_path / test
    sources = [ROOT / "tests" / "native" / f"{test}.cpp", ROOT / "_native" / f"{tested}.cpp"]
    command = [compiler, "-std=c++17", "-O1", "-pthread", "-I", ROOT / "_native", *sources, "-o", program]
    if subprocess.run([*command, "-fsanitize=thread"], capture_output=True, check=False).returncode != 0:
        subprocess.run(command, check=True)
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    done = subprocess.run([program], capture_output=True, text=True, check=False, timeout=120, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
