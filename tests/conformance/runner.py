"""Runs checks in processes of their own, so that none meets what another left behind or what the tests did."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import blocking, contexts, ordering  # noqa: F401  they add their checks to the list
from .gpu import ALONE, CHECKS, Gpu, TooShort

MOST_PATIENCE = 16


def _run(names: list[str], driver: str, quick: bool) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).parent), f"--driver={driver}", "--here", *names]
    if quick:
        command.append("--quick")
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
        output, error = result.stdout, result.stderr
    except subprocess.TimeoutExpired as expired:
        output, error = ((part or b"").decode() for part in (expired.stdout, expired.stderr))
        error += "\ndid not end"
    seen: dict[str, Any] = {}
    for line in output.splitlines():
        seen.update(json.loads(line))
    for name in names:
        seen.setdefault(name, {"error": error.strip().splitlines()[-3:]})
    return seen


def observe(names: list[str], driver: str, quick: bool = False) -> Iterator[tuple[str, Any]]:
    """What each check sees, in turn. Those that spoil nothing share one process."""
    shared = [name for name in names if name not in ALONE]
    if shared:
        yield from _run(shared, driver, quick).items()
    for name in names:
        if name in ALONE:
            yield from _run([name], driver, quick).items()


def differences(seen: Any, expected: Any, quick: bool, path: str = "") -> list[str]:
    """Where what is seen is not what is expected; a quick run need not see everything."""
    if not isinstance(seen, dict) or not isinstance(expected, dict):
        return [] if seen == expected else [f"{path}: {json.dumps(seen)}, expected {json.dumps(expected)}"]
    found = []
    for key in {**seen, **expected}:
        if key not in seen:
            if not quick:
                found.append(f"{path}/{key}: not seen")
        elif key not in expected:
            found.append(f"{path}/{key}: {json.dumps(seen[key])}, expected nothing")
        else:
            found += differences(seen[key], expected[key], quick, f"{path}/{key}")
    return found


def _try(gpu: Gpu, name: str) -> Any:
    """What a check sees, with kernels as long as this machine needs them to be."""
    while True:
        try:
            return CHECKS[name](gpu)
        except TooShort as error:
            if gpu.patience == MOST_PATIENCE:
                return {"error": [repr(error)]}
            gpu.patience *= 2
            gpu.call("cuCtxSynchronize")
        except Exception as error:
            return {"error": [f"{type(error).__name__}: {error}"]}


def run_here(names: list[str], driver: str, quick: bool) -> None:
    if driver == "emulated":
        from aiocuda_copy import testing

        testing.use_emulated_driver()
    gpu = Gpu(quick)
    for name in names:
        value = _try(gpu, name)
        print(json.dumps({name: value}), flush=True)
