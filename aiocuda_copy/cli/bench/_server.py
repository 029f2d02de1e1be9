"""How quickly a server answers while many clients fetch results from it: the load test of ``examples/server``."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import sys
from pathlib import Path

import numpy as np

from ._machine import Machine
from ._registry import Figure, Skipped, case

__all__ = ["BLOCKING", "HEALTH", "SERVER"]

SERVER = "server, 64 clients, 16 MiB results"
BLOCKING = "the same server with copies that block the loop"
HEALTH = "an unrelated answer"

_PACKAGES = ("starlette", "uvicorn")
_PATIENCE = 180.0


def _load_test() -> Path:
    """The script, which is in the source tree and not in the package."""
    # An installed package is looked for beside the folder that it was installed from, which is where `bench` is run.
    for root in (Path(__file__).parents[3], Path.cwd()):
        script = root / "examples" / "server" / "load_test.py"
        if script.exists():
            return script
    raise Skipped("the load test is in examples/server of the source tree; run this from there")


def _check_packages(machine: Machine) -> None:
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        are = "are" if len(missing) > 1 else "is"
        raise Skipped(f"{' and '.join(missing)} {are} not installed: pip install 'aiocuda-copy[server]'")
    if not machine.emulated and importlib.util.find_spec("torch") is None:
        raise Skipped("its model needs torch, which is not installed: pip install 'aiocuda-copy[torch]'")


async def _measure(machine: Machine, server: str) -> list[Figure]:
    script = _load_test()
    _check_packages(machine)
    clients, mib = (8, 0.5) if machine.emulated else (64, 16.0)
    options = {"server": server, "clients": clients, "mib": mib, "seconds": 4 * machine.beside_seconds}
    # It sees the packages that this process sees, and finds its own modules also where PYTHONSAFEPATH is set.
    path = os.pathsep.join([str(script.parent), *filter(None, sys.path)])
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(script),
        "--json",
        *(f"--{name}={value}" for name, value in options.items()),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(_PATIENCE):
            output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            # With the processes that it has started.
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if process.returncode:
        raise RuntimeError(errors.decode(errors="replace").strip().rpartition("\n")[2])
    (measured,) = json.loads(output)
    if measured["in_flight"]:
        raise RuntimeError(f"{measured['in_flight']} copies are in flight after all clients have gone")
    rate = measured["results"] * measured["nbytes"] / measured["seconds"] / 1e9
    return [Figure(HEALTH, np.array(measured["health_ms"]), "ms"), Figure("rate of the results", rate, "GB/s")]


@case(SERVER, warm=False, at_most=1)
async def awaited(machine: Machine) -> list[Figure]:
    return await _measure(machine, "awaited")


@case(SERVER, by=BLOCKING, warm=False, at_most=1)
async def blocking(machine: Machine) -> list[Figure]:
    return await _measure(machine, "blocking")
