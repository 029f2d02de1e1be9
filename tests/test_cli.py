"""The command line, as a user starts it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aiocuda_copy.cli import _host
from aiocuda_copy.cli._heartbeat import Heartbeat
from aiocuda_copy.cli._table import table
from aiocuda_copy.testing import emulated

EMULATED = emulated()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    driver = "emulated" if EMULATED else "real"
    command = [sys.executable, "-X", "dev", "-m", "aiocuda_copy", "--driver", driver, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_info_as_json() -> None:
    result = run("info", "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["emulated"] is EMULATED
    assert report["devices"][0]["memory_nbytes"] > 0
    assert report["host"]["affinity"] == len(os.sched_getaffinity(0))


def test_info_says_whether_it_is_emulated() -> None:
    result = run("info")
    assert result.returncode == 0, result.stderr
    assert ("EMULATED" in result.stdout) is EMULATED
    assert "device 0" in result.stdout


def run_with_environment(choice: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "aiocuda_copy", *arguments]
    environment = {**os.environ, "AIOCUDA_COPY_DRIVER": choice}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)


@pytest.mark.parametrize("choice", ["auto", "emulated" if EMULATED else "real"])
def test_the_environment_takes_the_values_of_the_option(choice: str) -> None:
    result = run_with_environment(choice, "info", "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["emulated"] is EMULATED


def test_an_unknown_driver_in_the_environment_is_one_sentence() -> None:
    result = run_with_environment("imaginary", "info")
    assert result.returncode == 2
    expected = "error: AIOCUDA_COPY_DRIVER must be one of auto, real, emulated, not 'imaginary'\n"
    assert result.stderr.endswith(expected)
    assert "Traceback" not in result.stderr
    assert run_with_environment("imaginary", "--driver", "real" if not EMULATED else "emulated", "info").returncode == 0


def test_the_real_driver_where_the_environment_has_loaded_the_emulated_one() -> None:
    result = run_with_environment("emulated", "--driver", "real", "info")
    assert result.returncode == 2
    assert "error: the real driver is asked for, but this process has loaded the emulated one" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("demo", "--mib", "0"), "argument --mib: must be at least 1, not 0"),
        (("demo", "--mib", "-3"), "argument --mib: must be at least 1, not -3"),
        (("bench", "--repeat", "0"), "argument --repeat: must be at least 1, not 0"),
        (("bench", "--json", "/nowhere/x.json"), "/nowhere/x.json cannot be written: /nowhere is not a folder"),
        (("bench", "--plot", "/"), "/ is a folder"),
    ],
)
def test_what_would_be_found_out_too_late(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_workload_by_its_whole_name() -> None:
    name = "await of 4 bytes, idle stream"
    assert run("bench", "--list", "--only", name).stdout == f"{name}\n"
    some = run("bench", "--list", "--only", "idle stream,at once").stdout.splitlines()
    assert name in some
    assert len(some) > 1


def test_demo_compares_every_byte() -> None:
    result = run("demo", "--mib", "2")
    assert result.returncode == 0, result.stdout + result.stderr
    assert ("EMULATED" in result.stdout) is EMULATED
    assert result.stdout.count(" same\n") == 6
    assert "DIFFERENT" not in result.stdout


@pytest.mark.emulated_only  # on a GPU it takes minutes, and is run for its figures
def test_bench_writes_every_run(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    result = run("bench", "--repeat", "2", "--only", "idle stream,4 KiB blocks", "--json", str(file))
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(file.read_text())
    assert report["emulated"] is EMULATED
    assert {len(row["values"]) for row in report["rows"]} <= {1, 2}
    assert "aiocuda_copy" in {row["by"] for row in report["rows"]}


def test_bench_lists() -> None:
    result = run("bench", "--list", "--only", "bulk")
    assert result.returncode == 0, result.stderr
    assert "bulk to host, pageable" in result.stdout.splitlines()
    assert all("bulk" in line for line in result.stdout.splitlines())


def test_bench_says_what_a_loop_needs() -> None:
    code = """
import sys
sys.modules["uvloop"] = None
from aiocuda_copy.cli import main
raise SystemExit(main(["--driver", "emulated", "bench", "--loop", "uvloop"]))
"""
    command = [sys.executable, "-X", "dev", "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 2
    assert result.stderr == "--loop uvloop needs uvloop, which is missing: pip install 'aiocuda-copy[uvloop]'\n"
    assert result.stdout == ""


@pytest.mark.asyncio_only
async def test_heartbeat_sees_a_blocked_loop() -> None:
    async with Heartbeat() as beat:
        await asyncio.sleep(0.005)
        time.sleep(0.05)  # noqa: ASYNC251 - the fault that is to be seen
    assert beat.longest >= 0.05


def test_table() -> None:
    assert table(["a", "bb"], [["x", "1"], ["long", "22"]]) == "a     bb\n----  --\nx      1\nlong  22"


@pytest.mark.parametrize(
    ("files", "processors", "memory"),
    [
        ({"cpu.max": "150000 100000", "memory.max": "1073741824"}, 1.5, 1 << 30),
        ({"cpu.max": "max 100000", "memory.max": "max"}, None, None),
        ({}, None, None),
    ],
)
def test_control_group_limits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: dict[str, str], processors: float | None, memory: int | None
) -> None:
    """A limit of a parent holds as well."""
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(_host, "_groups", lambda controller: [tmp_path / "child", tmp_path])
    found = _host.limits()
    assert found["cgroup_processors"] == processors
    assert found["cgroup_memory_nbytes"] == memory
