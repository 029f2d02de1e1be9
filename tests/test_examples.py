"""Every example runs to its end on the emulated driver; each of them checks its own result."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
# Ray takes its time to start: test_ray_example.py does it once, for this example and for what else there is to test.
EXAMPLES = [path for path in EXAMPLES if path.stem != "ray_actors"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", str(path)],
        env={**os.environ, "AIOCUDA_COPY_DRIVER": "emulated"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout
