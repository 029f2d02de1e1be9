"""Where the system has no thread to give: what can be done without one is done, and the rest is an error."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.emulated_only, pytest.mark.no_sanitizer]

WITHOUT_THREADS = """
import asyncio, ctypes, sys
import numpy as np
from aiocuda_copy import Copier, copy_batch, copy_to_device, copy_to_host, pinned_empty
from aiocuda_copy.cli import _raw
from aiocuda_copy.testing import DeviceArray, use_emulated_driver

emulator = use_emulated_driver()
allow = ctypes.CDLL(sys.argv[1]).allow_threads
content = np.random.default_rng(1).integers(0, 256, 9_000_001, np.uint8)
array, target = DeviceArray.from_numpy(content), np.zeros_like(content)
pinned = pinned_empty(content.shape, np.uint8)
number = DeviceArray.from_numpy(np.arange(1, dtype=np.int32) + 7)
stream = _raw.Stream()

async def copied(copier):
    target[:] = 0
    await copier.copy_to_host(array, target)
    assert np.array_equal(target, content)
    await copier.copy_to_device(target[::-1].copy(), array)
    assert np.array_equal(array.to_numpy(), content[::-1])
    await copier.copy_to_device(content, array)

async def main():
    small = np.zeros(1, np.int32)
    allow(0)
    for call in (
        lambda: copy_to_host(array, target),
        lambda: copy_to_host(number, small),
        lambda: copy_to_device(target, array),
        lambda: copy_to_host(array, pinned, in_stream=True),
        lambda: copy_batch(None, [array], [target]),
    ):
        try:
            await call()
        except RuntimeError as exc:
            assert "ulimit -u" in str(exc), exc
        else:
            raise AssertionError("it was done without a thread")
    assert not target.any() and not small.any()
    assert np.array_equal(array.to_numpy(), content)

    async with Copier(workers=1) as narrow, Copier() as wide:
        # The engine's alone: it does what workers would.
        allow(1)
        await copied(wide)
        await copied(narrow)
        await asyncio.gather(*(copier.copy_to_host(array, np.empty_like(content)) for copier in (wide, narrow) * 3))
        await copy_to_host(number, small)
        assert small[0] == 7
        # Behind a kernel that runs for long no host function tells, and the engine looks by itself.
        emulator.kernel(stream, 50)
        await copy_to_host(number, small, stream=stream)
        # A single worker.
        allow(1)
        await copied(wide)
        allow(1000)
        await copied(wide)
        assert wide.stats().failed == narrow.stats().failed == 0

asyncio.run(main())
"""


CHECKPOINT_WITHOUT_THREADS = """
import asyncio, ctypes, os, pathlib, sys, time
import numpy as np
sys.path.insert(0, sys.argv[2])
import checkpoint
from aiocuda_copy.testing import DeviceArray, use_emulated_driver

use_emulated_driver()
allow = ctypes.CDLL(sys.argv[1]).allow_threads
folder = pathlib.Path(sys.argv[3])
SMALL = dict(slots=6, slot_nbytes=4096, threads=4)
array = DeviceArray.from_numpy(np.arange(100_000, dtype=np.uint8))
file = folder / "whole"
ended, late = False, []

def slowly(call):
    def slow(*arguments):
        if ended:
            late.append(arguments)
        time.sleep(0.02)  # so that others are at work, or wait for a thread, when one cannot be started
        return call(*arguments)
    return slow

async def main():
    global ended
    await checkpoint.save(array, file, **SMALL)
    os.pwrite, os.preadv = slowly(os.pwrite), slowly(os.preadv)
    for threads in range(4):
        for job in (checkpoint.save(array, folder / "none", **SMALL), checkpoint.load(file, array, **SMALL)):
            allow(threads)
            ended = False
            try:
                await job
            except RuntimeError as exc:
                assert "start new thread" in str(exc), exc
            else:
                raise AssertionError("it was done without its threads")
            ended = True
            allow(1000)
            await asyncio.sleep(0.1)  # longer than a call takes, for one that was not waited for
            assert not late, late
    assert os.listdir(folder) == ["whole"]
    assert file.read_bytes() == np.arange(100_000, dtype=np.uint8).tobytes()

asyncio.run(main())
"""


@pytest.fixture
def refusing(tmp_path: Path) -> Path:
    """A library that, where it is preloaded, can keep the process from starting threads."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler (c++)")
    library = tmp_path / "no_threads.so"
    source = Path(__file__).parent / "native" / "no_threads.cpp"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", source, "-o", library, "-ldl"], check=True)
    return library


def run(script: str, library: Path, *arguments: Path) -> None:
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    command = [sys.executable, "-c", script, library, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_threads(refusing: Path) -> None:
    run(WITHOUT_THREADS, refusing)


def test_a_checkpoint_without_threads(refusing: Path, tmp_path: Path) -> None:
    """What a thread of the file has taken is waited for, also where another one could not be started."""
    folder = tmp_path / "folder"
    folder.mkdir()
    run(CHECKPOINT_WITHOUT_THREADS, refusing, Path(__file__).parent.parent / "examples", folder)
