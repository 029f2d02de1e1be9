"""The one line that shows a copy's progress with tqdm, and the one for rich."""

from __future__ import annotations

import io
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from calls import BULK, Stream, on_device

from aiocuda_copy import copy_to_host
from aiocuda_copy.testing import Emulator, emulated

EXAMPLE = Path(__file__).parents[1] / "examples" / "progress.py"
PACKAGES = ("tqdm", "rich")


class Bars:
    """Stands for a package's bar: how far it is, beside what the copy has said."""

    def __init__(self, package: str, total: int) -> None:
        self.said: list[int] = []
        self.shown: list[float] = []
        self._done: Callable[[], float]
        self._one_line: Callable[[int, int], object]
        if package == "tqdm":
            bar = pytest.importorskip("tqdm").tqdm(total=total, file=io.StringIO())
            self._one_line = lambda done, total: bar.update(done - bar.n)
            self._done, self.close = lambda: bar.n, bar.close
        else:
            console = pytest.importorskip("rich.console").Console(file=io.StringIO())
            bars = pytest.importorskip("rich.progress").Progress(console=console)
            task = bars.add_task("copy", total=total)
            self._one_line = lambda done, total: bars.update(task, completed=done)
            self._done, self.close = lambda: bars.tasks[0].completed, bars.stop
            bars.start()

    def progress(self, done: int, total: int) -> None:
        self._one_line(done, total)
        self.said.append(done)
        self.shown.append(self._done())


@pytest.mark.parametrize("package", PACKAGES)
def test_the_bar_is_where_the_copy_is(package: str) -> None:
    bars = Bars(package, 100)
    for done in (0, 10, 10, 35, 100):
        bars.progress(done, 100)
    bars.close()
    assert bars.shown == bars.said == [0, 10, 10, 35, 100]


@pytest.mark.parametrize("package", PACKAGES)
async def test_a_copy_fills_the_bar(gpu: Emulator | None, package: str) -> None:
    bars = Bars(package, BULK)
    host = await copy_to_host(on_device(BULK, 7), stream=Stream(), progress=bars.progress)
    bars.close()
    assert (host == 7).all()
    assert bars.shown == bars.said
    assert bars.shown[-1] == BULK


@pytest.mark.parametrize("package", PACKAGES)
async def test_the_example_itself(gpu: Emulator | None, package: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(package)
    show = SimpleNamespace(**runpy.run_path(str(EXAMPLE)))
    device, host = on_device(BULK, 7), np.full(BULK, 7, np.uint8)
    await {"tqdm": show.with_tqdm, "rich": show.with_rich}[package](device, host)
    shown: Any = capsys.readouterr()
    assert f"{package}" in shown.out + shown.err
    assert (device.to_numpy() == 7).all()


# Runs the example where no packages are found beyond those that it cannot do without.
WITHOUT = """
import importlib.util, runpy, sys
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in ("tqdm", "rich") else find_spec(name, *rest)
sys.argv = [sys.argv[1], "1"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_without_either_package_a_sentence_says_what_to_install() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, str(EXAMPLE)],
        env={**os.environ, "AIOCUDA_COPY_DRIVER": "emulated" if emulated() else "real"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *sentences, result = done.stdout.splitlines()
    assert sentences == [f"{name} is not installed: pip install 'aiocuda-copy[progress]'" for name in ("tqdm", "rich")]
    assert "the same" in result
