"""What the engine tells the loop ahead of time."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.emulated_only

ROOT = Path(__file__).parent.parent


def test_forecasts(tmp_path: Path) -> None:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler (c++)")
    program = tmp_path / "forecast"
    source = ROOT / "tests" / "native" / "forecast.cpp"
    subprocess.run([compiler, "-std=c++17", "-pthread", "-I", ROOT / "_native", source, "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout
