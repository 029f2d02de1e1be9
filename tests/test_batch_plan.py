"""``info --batch``: what is said of a batch is what becomes of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aiocuda_copy.cli import main
from aiocuda_copy.cli._batch_plan import lines, parse_batch, plan
from aiocuda_copy.testing import Emulator, emulated

KERNEL, ENGINE = "kernel", "copy engine"


@pytest.fixture(autouse=True)
def the_driver_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOCUDA_COPY_DRIVER", "emulated" if emulated() else "real")


@pytest.mark.parametrize(
    ("text", "route", "road", "pieces"),
    [
        ("1000x16KiB", "to_host_direct", KERNEL, 4),
        ("2000x16KiB:pageable:device", "to_device_staged", KERNEL, 8),
        ("100x65535:device:pinned", "to_host_direct", KERNEL, 2),
        ("100x5KiB:device:pinned", "to_host_direct", KERNEL, 1),
        ("1000x65536:pinned:device", "to_device_direct", ENGINE, 8),
        ("1x512", "to_host_direct", ENGINE, 1),
        ("3x1MiB:device:device", "device_to_device", KERNEL, 1),
    ],
)
def test_plans(text: str, route: str, road: str, pieces: int, gpu: Emulator | None) -> None:
    found = plan(parse_batch(text))
    assert found["kernel"] == "ready"
    (part,) = found["parts"]
    assert (part["route"], part["road"], part["pieces"]) == (route, road, pieces)
    assert part["entries"] == found["count"]
    assert part["nbytes"] == found["count"] * found["nbytes"]
    assert any(road in name for name, _ in lines(found))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("100", "write COUNTxSIZE"),
        ("axb", "write COUNTxSIZE"),
        ("1x1:pinned:pinned", "one side must be the device"),
        ("1x1:device:disk", "'disk' is no kind of memory"),
        ("0x1", "at least one entry"),
        ("1x0", "at least one byte"),
        ("9000000000x9000000000", "more than there are addresses for"),
        ("1x99999999999999999999MiB", "write COUNTxSIZE"),
        ("\u0661x1", "write COUNTxSIZE"),
    ],
)
def test_what_is_no_batch(text: str, words: str, gpu: Emulator | None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=words):
        parse_batch(text)
    assert run("info", "--batch", text) == 2
    assert words in capsys.readouterr().err


def test_where_it_is_printed(gpu: Emulator | None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("info", "--batch", "100x16KiB") == 0
    assert "by the kernel" in capsys.readouterr().out
    assert run("info", "--json", "--batch", "100x16KiB") == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert report["batch"]["parts"][0]["road"] == KERNEL


def test_no_room(emulated_gpu: Emulator, capsys: pytest.CaptureFixture[str]) -> None:
    emulated_gpu.limit_memory(device_nbytes=1 << 20)
    assert run("info", "--batch", "2x1MiB:device:pageable") == 1
    assert "no room for the batch" in capsys.readouterr().err


def run(*words: str) -> int:
    return main(["--driver", "auto", *words])
