"""The suite's own conditions: each kind of thing left behind fails a test."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

GUILTY = """
import asyncio, os, threading
import pytest

pytestmark = pytest.mark.asyncio_only

async def test_loop_exception():
    def fail():
        raise LookupError
    asyncio.get_running_loop().call_soon(fail)
    await asyncio.sleep(0)

async def test_loop_message():
    asyncio.get_running_loop().call_exception_handler({"message": "no exception, a message"})

async def test_future_never_retrieved():
    asyncio.get_running_loop().create_future().set_exception(LookupError())
    await asyncio.sleep(0)

async def test_task_never_retrieved():
    async def fail():
        raise LookupError
    task = asyncio.create_task(fail())
    await asyncio.sleep(0.001)
    del task

async def test_never_awaited():
    asyncio.sleep(0)

def test_thread():
    def fail():
        raise LookupError
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()

def test_unraisable():
    class Bad:
        def __del__(self):
            raise LookupError
    Bad()

def test_descriptor():
    os.dup(0)

async def test_pipe():
    os.pipe()
"""

INNOCENT = """
import asyncio, sys
import anyio, pytest

async def test_all_loops(anyio_backend_name):
    await anyio.sleep(0)
    if anyio_backend_name == "trio":
        print("LOOP trio")

@pytest.mark.asyncio_only
async def test_loops():
    loop = asyncio.get_running_loop()
    ran = []
    async def note():
        ran.append(True)
    task = asyncio.create_task(note())
    print("LOOP", type(loop).__module__.partition(".")[0], "debug" * loop.get_debug(), "eager" * len(ran))
    await task
    async def fail():
        raise LookupError
    [outcome] = await asyncio.gather(fail(), return_exceptions=True)
    assert isinstance(outcome, LookupError)

def test_plain():
    pass
"""


@pytest.fixture
def suite(pytester: pytest.Pytester, pytestconfig: pytest.Config) -> pytest.Pytester:
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text())
    (pytester.path / "pyproject.toml").write_text((pytestconfig.rootpath / "pyproject.toml").read_text())
    return pytester


def test_what_is_left_behind_fails(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_guilty=GUILTY)
    result = suite.runpytest_subprocess("test_guilty.py", "-k", "not uvloop")
    guilty = set()
    for line in result.outlines:
        if line.startswith(("FAILED ", "ERROR ")) and "::" in line:
            guilty.add(line.split("::")[1].split(" ")[0].split("[")[0])
    expected = {line.split("def ")[1].split("(")[0] for line in GUILTY.splitlines() if "def test_" in line}
    assert guilty == expected


def test_the_matrix(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_innocent=INNOCENT)
    result = suite.runpytest_subprocess("test_innocent.py", "-s", "-v")
    assert result.ret == 0
    loops = {line.split("LOOP ")[1].strip() for line in result.outlines if "LOOP" in line}
    eager = {"asyncio debug eager"} if sys.version_info >= (3, 12) else set()
    trio = {"trio"} if importlib.util.find_spec("trio") else set()
    assert loops == {"asyncio debug", "uvloop"} | trio | eager
