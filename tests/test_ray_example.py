"""The offloader on Ray actors, and the how-to page: Ray itself, two actors, a device for each. All in one process that
ends with Ray."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from aiocuda_copy.testing import emulated

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
PAGE = (ROOT / "docs" / "howto" / "run-on-ray.md").read_text()
BLOCKS = re.findall(r"^```python ray\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)

SCRIPT = """
import sys

import numpy as np
import ray
import ray_actors
from kv_offload import Full, Gone

def fails(error, reference):
    try:
        ray.get(reference)
    except error as exc:
        return str(exc)
    raise AssertionError(f"no {error.__name__}")

actors = ray_actors.start(2, 64, 4096)
try:
    ray_actors.demonstrate(actors, 64)
    here, there = actors
    assert ray.get(here.device.remote()) != ray.get(there.device.remote())

    # Errors are those of the offloader.
    assert "not to be had" in fails(Full, here.take.remote("too large", np.zeros((65, 4096), np.uint8), 0))
    fails(Gone, there.give.remote("never heard of"))

    # A cancelled call ends, and the actor goes on, with every byte where it was.
    before = ray.get(here.figures.remote()).out.batches
    endless = here.serve.remote(10**9, 7)
    while ray.get(here.figures.remote()).out.batches < before + 5:
        pass
    ray.cancel(endless)
    fails(ray.exceptions.TaskCancelledError, endless)
    print(ray.get(here.serve.remote(64, 0)))

    # The page's actors have the devices next. Ray itself is there already.
    del actors, here, there, endless
    ray.init = lambda: None
    exec(sys.argv[1], {"__name__": "__main__"})
finally:
    ray.shutdown()
assert not ray.is_initialized()
print("done")
"""


def python(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(EXAMPLES), *sys.path])}
    if emulated():
        environment["AIOCUDA_COPY_DRIVER"] = "emulated"
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", script, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)


@pytest.mark.emulated_only  # two devices may not be there, and Ray must not be taken for free to use them
def test_two_actors() -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'aiocuda-copy[ray]'")
    done = python(SCRIPT, *BLOCKS)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert len(BLOCKS) == 1
    assert done.stdout.count("every byte is the same") == 4
    assert done.stdout.endswith("done\n")


def test_without_ray_it_says_what_is_missing() -> None:
    done = python("import sys; sys.modules['ray'] = None; import ray_actors")
    assert done.returncode == 1
    assert done.stderr == "this example needs Ray: pip install 'aiocuda-copy[ray]'\n"
