"""The benchmark's own logic: who takes turns with whom, what is compared with what, what is written. Never how long."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aiocuda_copy.cli.bench import _cases, _measure, _offload, _peers, _plot, _report, _targets  # noqa: F401
from aiocuda_copy.cli.bench._measure import AWAIT, GAP, RATE, steps, until_stuck
from aiocuda_copy.cli.bench._registry import LINK, OWN, Case, Figure, Skipped, contains, select
from aiocuda_copy.cli.bench._results import Results
from aiocuda_copy.cli.bench._run import measure
from aiocuda_copy.cli.bench._targets import TARGETS, Target, judge
from aiocuda_copy.testing import emulated

EMULATED = emulated()
PEER = "somebody"


def case(log: list[str], by: str, value: float = 1.0, error: Exception | None = None, **options: Any) -> Case:
    async def run(machine: Any) -> list[Figure]:
        log.append(by)
        if error is not None and log.count(by) > 1:
            raise error
        return [Figure(RATE, value, "GB/s")]

    return Case("work", by, run, **options)


def run_all(cases: list[Case], repeat: int, seconds: float = 100.0) -> Results:
    results = Results()
    machine: Any = SimpleNamespace(workload_seconds=seconds)
    asyncio.run(measure({"work": cases}, machine, repeat, results))
    return results


def test_all_take_turns() -> None:
    log: list[str] = []
    results = run_all([case(log, OWN), case(log, PEER)], 3)
    assert log == [OWN, PEER] * 4
    row = results.get("work", PEER, RATE)
    assert row is not None
    assert row.values == [1.0, 1.0, 1.0]


def test_some_are_repeated_less() -> None:
    log: list[str] = []
    run_all([case(log, OWN), case(log, PEER, warm=False, at_most=1)], 2)
    assert log == [OWN, OWN, PEER, OWN]


def test_no_repetition_begins_when_the_time_is_over() -> None:
    log: list[str] = []
    run_all([case(log, OWN), case(log, PEER)], 5, seconds=-1.0)
    assert log == [OWN, PEER] * 2


@pytest.mark.parametrize("error", [ValueError("broken"), Skipped("there is one device")])
def test_who_fails_is_left_out_and_the_others_go_on(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    log: list[str] = []
    results = run_all([case(log, OWN, error=error), case(log, PEER)], 3)
    assert log.count(OWN) == 2
    assert log.count(PEER) == 4
    where = results.skipped if isinstance(error, Skipped) else results.failed
    assert str(error) in where["work", OWN]
    assert str(error) in capsys.readouterr().err


def made_up(*figures: tuple[str, str, Any]) -> Results:
    results = Results()
    for by, metric, value in figures:
        results.add("work", by, [Figure(metric, value, "µs" if metric == AWAIT else "GB/s")])
    return results


def test_ratios() -> None:
    results = made_up((OWN, RATE, 50.0), (LINK, RATE, 100.0), (PEER, RATE, 10.0))
    ratios = {entry["by"]: (entry["of_ours"], entry["of_link"]) for entry in results.ratios()}
    assert ratios == {OWN: (1.0, 0.5), LINK: (2.0, 1.0), PEER: (0.2, 0.1)}


def test_medians_are_compared_repetition_by_repetition() -> None:
    slow_once = made_up(
        *((by, AWAIT, v) for by, values in ((OWN, (9.0, 30.0, 12.0)), (PEER, (6.0, 20.0, 6.0))) for v in values)
    )
    assert {entry["by"]: entry["of_ours"] for entry in slow_once.ratios()} == {OWN: 1.0, PEER: 6 / 9}
    uneven = made_up((OWN, AWAIT, 2.0), (OWN, AWAIT, 4.0), (PEER, AWAIT, 6.0))
    assert {entry["by"]: entry["of_ours"] for entry in uneven.ratios()} == {OWN: 1.0, PEER: 2.0}


def test_gaps_are_compared_by_the_longest() -> None:
    results = made_up((OWN, GAP, 1.0), (OWN, GAP, 5.0), (PEER, GAP, 10.0))
    assert {entry["by"]: entry["of_ours"] for entry in results.ratios()} == {OWN: 1.0, PEER: 2.0}


@pytest.mark.parametrize(
    ("target", "measured", "verdict"),
    [
        (Target("", "work", RATE, times=LINK, at_least=0.9), 0.9, "met"),
        (Target("", "work", RATE, times=LINK, at_least=0.91), 0.9, "missed"),
        (Target("", "work", AWAIT, at_most=2.0), 2.0, "met"),
        (Target("", "work", AWAIT, "longest", at_most=2.0), 3.0, "missed"),
        (Target("", "work", AWAIT, times=PEER, at_most=0.5), 0.5, "met"),
        (Target("", "work", AWAIT, above=PEER, at_most=-3.0), -2.0, "missed"),
        (Target("", "work", AWAIT, by=PEER, at_most=4.0), 4.0, "met"),
        (Target("", "work", AWAIT, times=PEER), 0.5, "recorded"),
        (Target("", "work", AWAIT, times="nobody", at_most=1.0), None, "not measured"),
        (Target("", "work", AWAIT, times="in no time", at_most=1.0), None, "not measured"),
        (Target("", "work", "what nobody measures", at_most=1.0), None, "not measured"),
    ],
)
def test_verdicts(monkeypatch: pytest.MonkeyPatch, target: Target, measured: float | None, verdict: str) -> None:
    results = made_up(
        (OWN, RATE, 90.0), (LINK, RATE, 100.0), (PEER, AWAIT, 4.0), (OWN, AWAIT, np.array([1.0, 2.0, 3.0])),
        ("in no time", AWAIT, 0.0),
    )  # fmt: skip
    monkeypatch.setattr(_targets, "TARGETS", (target,))
    (found,) = judge(results, {}, emulated=False)
    assert found.verdict == verdict
    assert found.measured == measured
    assert bool(found.note) is (verdict == "not measured")
    if measured is not None and target.by == OWN and target.metric == AWAIT:
        ours = 3.0 if target.statistic == "longest" else 2.0
        assert found.peers == {
            PEER: {"value": 4.0, "of_ours": 4.0 / ours},
            "in no time": {"value": 0.0, "of_ours": 0.0},
        }
    assert json.dumps(found.as_json(), allow_nan=False)
    assert all(isinstance(cell, str) for cell in found.cells())
    (found,) = judge(results, {}, emulated=True)
    assert found.verdict not in ("met", "missed")


def test_why_a_target_could_not_be_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    results = made_up((OWN, AWAIT, 1.0))
    monkeypatch.setattr(_targets, "TARGETS", (Target("", "work", AWAIT, times="torch .item()", at_most=1.0),))
    (found,) = judge(results, {"torch": "torch is not installed."}, emulated=False)
    assert found.note == "torch is not installed."
    results.failed["work", "torch .item()"] = "RuntimeError: broken"
    (found,) = judge(results, {}, emulated=False)
    assert found.note == "RuntimeError: broken"


def test_targets_name_cases_that_there_are() -> None:
    everything = select(None, frozenset(_peers.PEERS))
    for target in TARGETS:
        performers = {case.by for case in everything[target.workload]}
        assert {target.by, target.other or target.by} <= performers, target


def test_selection() -> None:
    assert contains(None, "anything")
    assert contains("b,any", "anything")
    assert not contains("b,c", "anything")
    alone = select("await of 4 bytes, idle")
    assert all(case.requires is None for cases in alone.values() for case in cases)
    with_core = select("await of 4 bytes, idle", frozenset({"cuda.core"}))
    assert {case.requires for cases in with_core.values() for case in cases} == {None, "cuda.core"}


def test_data_in_motion_is_what_the_examples_do(monkeypatch: pytest.MonkeyPatch) -> None:
    workloads = [_offload.OFFLOAD, _offload.OFFLOAD_SMALL, _offload.OFFLOAD_BESIDE_READER, _offload.CHECKPOINT]
    assert list(select("offload")) == workloads
    examples = Path(__file__).parents[1] / "examples"
    monkeypatch.chdir(examples.parent)
    assert Path(_offload._example("checkpoint").__file__) == examples / "checkpoint.py"
    with pytest.raises(Skipped, match=r"examples/nothing\.py is neither"):
        _offload._example("nothing")


def test_a_checkpoint_fits_the_ram_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine: Any = SimpleNamespace(checkpoint_nbytes=8 << 30)
    monkeypatch.setattr(_offload, "_RAM_DISK", tmp_path)
    free = 5 << 20
    monkeypatch.setattr(_offload.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    assert _offload._checkpoint_nbytes(machine) == 2 << 20
    free = 100 << 30
    assert _offload._checkpoint_nbytes(machine) == 8 << 30
    free = 1 << 20
    with pytest.raises(Skipped, match="full"):
        _offload._checkpoint_nbytes(machine)
    monkeypatch.setattr(_offload, "_RAM_DISK", tmp_path / "nothing")
    with pytest.raises(Skipped, match="there is no"):
        _offload._checkpoint_nbytes(machine)


def test_peers_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="nonsense"):
        _peers.available("torch,nonsense", emulated=True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found, missing = _peers.available("torch, cuda.core", emulated=False)
    assert not found
    assert missing["torch"] == ("torch is not installed, so its cases are left out: pip install 'aiocuda-copy[torch]'")
    assert "matplotlib" in (_plot.why_not() or "")


async def _three_steps(error: Exception | None = None) -> str:
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    if error is not None:
        raise error
    return "result"


@pytest.mark.asyncio_only
async def test_steps_of_an_await() -> None:
    times: list[float] = []
    assert await steps(_three_steps(), times) == "result"
    assert len(times) == 3
    with pytest.raises(ValueError, match="broken"):
        await steps(_three_steps(ValueError("broken")), times)
    task = asyncio.create_task(_wrapped(asyncio.sleep(3600), times))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def _wrapped(awaitable: Awaitable[object], times: list[float]) -> None:
    await steps(awaitable, times)


@pytest.mark.asyncio_only
@pytest.mark.parametrize("stuck", [False, True])
async def test_what_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch, stuck: bool) -> None:
    monkeypatch.setattr(_measure, "GIVE_UP_SECONDS", 0.01)
    once: Callable[[], Awaitable[object]] = (lambda: asyncio.sleep(3600)) if stuck else (lambda: asyncio.sleep(0))
    times, note = await until_stuck(once, 0.005)
    assert bool(note) is stuck
    assert len(times) > 0


@pytest.mark.asyncio_only
async def test_an_error_is_no_reason_to_give_up() -> None:
    with pytest.raises(ValueError, match="broken"):
        await until_stuck(lambda: _three_steps(ValueError("broken")), 10.0)


# In a process of its own, for matplotlib keeps the files of its fonts open.
DRAW = """
import sys
from aiocuda_copy.cli.bench import _cases, _plot
from aiocuda_copy.cli.bench._registry import LINK, OWN, Figure
from aiocuda_copy.cli.bench._results import Results

results = Results()
for by, rate in ((OWN, 50.0), (LINK, 55.0), ("somebody", 15.0)):
    results.add("work", by, [Figure("rate", rate, "GB/s")])
results.add("other work", OWN, [Figure("await", 100.0, "µs", "not done after 5 s")])
for file in sys.argv[1:]:
    _plot.draw(results, "a title", file)
_plot.draw(Results(), "nothing", sys.argv[1] + ".pdf")
"""


def test_plot(tmp_path: Path) -> None:
    if not importlib.util.find_spec("matplotlib"):
        pytest.skip("matplotlib is not installed")
    files = [tmp_path / "plot.png", tmp_path / "plot"]
    subprocess.run([sys.executable, "-c", DRAW, *map(str, files)], check=True, timeout=120)
    for file in files:
        assert file.read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "plot.png.pdf").read_bytes().startswith(b"%PDF")


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "aiocuda_copy",
        "--driver",
        "emulated" if EMULATED else "real",
        "bench",
        *arguments,
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.emulated_only  # on a GPU it takes minutes, and is run for its figures
def test_a_whole_run(tmp_path: Path) -> None:
    file, picture = tmp_path / "figures.json", tmp_path / "figures.png"
    options = [
        "--quick",
        "--repeat",
        "1",
        "--peers",
        "torch,cupy,cuda.core",
        "--json",
        str(file),
        "--plot",
        str(picture),
    ]
    result = bench(*options)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(file.read_text())
    assert report["failed"] == []
    assert "cuda.core" in report["peers"]
    assert set(report["peers"]) | set(report["missing_peers"]) == set(_peers.PEERS)
    for sentence in report["missing_peers"].values():
        assert sentence in result.stderr
    assert {"python", "numpy", "cuda-core"} <= report["versions"].keys()
    assert report["devices"]
    assert report["host"]["affinity"]
    assert [verdict["name"] for verdict in report["targets"]] == [target.name for target in TARGETS]
    for verdict in report["targets"]:
        assert verdict["name"] in result.stdout
        if EMULATED:
            assert verdict["verdict"] in ("not judged", "recorded", "not measured")
        assert (verdict["measured"] is None) is (verdict["verdict"] == "not measured")
    measured = {verdict["name"] for verdict in report["targets"] if verdict["measured"] is not None}
    assert {"a completed await", "a submission", "host memory held for 16 GiB"} <= measured
    assert {row["by"] for row in report["rows"]} >= {OWN, LINK}
    for row in report["rows"]:
        assert row["count"] >= len(row["values"]) == 1
        assert row["least"] <= row["median"] <= row["99th percentile"] <= row["longest"]
    assert any(entry["of_ours"] and entry["by"].startswith("cuda.core") for entry in report["ratios"])
    if importlib.util.find_spec("matplotlib"):
        assert picture.read_bytes().startswith(b"\x89PNG")
    else:
        assert "matplotlib" in result.stderr


def test_wrong_options() -> None:
    assert bench("--peers", "nonsense").returncode == 2
    result = bench("--only", "nothing is called so")
    assert result.returncode == 1
    assert "nothing is called so" in result.stderr


def test_report_names_the_commit() -> None:
    commit = _report.commit()
    assert commit is None or len(commit.split()[0]) == 40
