"""The command line: ``python -m aiocuda_copy info|demo|bench``."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from ._choose import choose_driver

__all__ = ["main"]


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m aiocuda_copy", description="asyncio-native copies between GPU and host memory"
    )
    parser.add_argument(
        "--driver",
        choices=("auto", "real", "emulated"),
        default="auto",
        help="auto (the default) takes the emulated driver where there is no GPU",
    )
    commands = parser.add_subparsers(dest="command", required=True)

    info = commands.add_parser("info", help="driver, devices, host limits, and the paths that copies will take")
    info.add_argument("--json", action="store_true", help="print JSON")
    info.add_argument(
        "--batch",
        metavar="COUNTxSIZE[:FROM:TO]",
        help="also print how a batch will travel, such as 10000x16KiB:device:pinned (or pageable)",
    )

    demo = commands.add_parser("demo", help="copy real arrays both ways and compare every byte")
    demo.add_argument(
        "--mib", metavar="N", type=_positive, help="size of the big copies, in MiB (default: 256, emulated 32)"
    )

    bench = commands.add_parser("bench", help="measure this machine")
    bench.add_argument("--json", metavar="FILE", help="write the results, and what they were measured on, to FILE")
    bench.add_argument("--peers", metavar="NAMES", help="do the same with others: torch, cupy, cuda.core (a,b,c)")
    bench.add_argument("--plot", metavar="FILE", help="draw the results to FILE (needs matplotlib)")
    bench.add_argument("--quick", action="store_true", help="measure everything for a shorter time")
    bench.add_argument(
        "--only",
        metavar="WORDS",
        help="only the workload of this name, or those whose names contain one of these words (a,b,c)",
    )
    bench.add_argument(
        "--repeat", metavar="N", type=_positive, help="most repetitions of each workload (default: 5, quick 2)"
    )
    bench.add_argument("--loop", choices=("asyncio", "uvloop"), default="asyncio", help="event loop (default: asyncio)")
    bench.add_argument("--list", action="store_true", help="list the workloads and stop")

    arguments = parser.parse_args(argv)
    try:
        arguments.emulated = choose_driver(arguments.driver)
    except ValueError as exc:
        parser.error(str(exc))
    # One command does not load what another needs; help loads nothing.
    run = importlib.import_module(f".{arguments.command}", __name__).run
    try:
        return int(run(arguments))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
