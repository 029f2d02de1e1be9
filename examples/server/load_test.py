"""Asks a server for its health while many clients fetch results: one that awaits its copies, and one that blocks.

    python examples/server/load_test.py [--clients 64] [--mib 16] [--seconds 3]

The two servers differ in the one call that copies. A server, and the clients that fetch, are each a process of their
own; this one asks for the health. At the end the clients break off in the middle of whatever they fetch, and the server
is asked what is still in flight.

AIOCUDA_COPY_DRIVER=emulated runs it without a GPU; its figures mean nothing then.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from typing import Any

import numpy as np
from app import serve
from model import emulated, expected, why_not

SERVERS = ("awaited", "blocking")
# Who asks waits for the answer and then a moment; several do, so that there are samples of a server that is slow.
ASKING, PAUSE = 4, 0.01
PATIENCE = 60.0


@dataclass
class Measured:
    """What one server did."""

    server: str
    health_ms: list[float]
    results: int
    nbytes: int
    seconds: float
    in_flight: int

    def cells(self) -> list[str]:
        middle, late, most = np.percentile(self.health_ms, [50, 99, 100])
        rate = f"{self.results * self.nbytes / self.seconds / 1e9:.2f}"
        figures = [f"{value:.2f}" for value in (middle, late, most)]
        return [self.server, str(self.results), rate, str(len(self.health_ms)), *figures, str(self.in_flight)]


HEADER = ["copies", "results", "GB/s", "health asked", "p50 ms", "p99 ms", "most ms", "in flight afterwards"]


def measure(server: str, clients: int, nbytes: int, seconds: float) -> Measured:
    context = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        port = listener.getsockname()[1]
        serving = context.Process(
            target=serve, args=(listener,), kwargs={"blocking": server == "blocking"}, daemon=True
        )
        serving.start()
    warm = context.Event()
    results = context.Value("q", 0)
    fetching = context.Process(target=fetch, args=(port, clients, nbytes, warm, results), daemon=True)
    try:
        fetching.start()
        wait_for(warm, serving, fetching)
        begin, before = time.perf_counter(), results.value
        times = ask(port, seconds)
        passed, fetched = time.perf_counter() - begin, results.value - before
        if not fetching.is_alive():
            raise SystemExit("the clients ended while they were to fetch")
        fetching.kill()
        return Measured(server, times, fetched, nbytes, passed, in_flight_at_last(port))
    finally:
        fetching.kill()
        serving.terminate()
        fetching.join()
        serving.join(10)
        serving.kill()


def wait_for(warm: Any, *processes: Any) -> None:
    end = time.monotonic() + PATIENCE
    while not warm.wait(0.1):
        if not all(process.is_alive() for process in processes):
            raise SystemExit("the server or its clients ended before they had begun")
        if time.monotonic() > end:
            raise SystemExit(f"the server has not answered each client once after {PATIENCE:.0f} s")


def fetch(port: int, clients: int, nbytes: int, warm: Any, results: Synchronized[int]) -> None:
    """Fetches results until the process is ended."""
    first = threading.Barrier(clients, action=warm.set)

    def fetch_one_after_another(seed: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        body = bytearray(nbytes)

        def fetch_one() -> None:
            connection.request("GET", f"/result?nbytes={nbytes}&seed={seed}")
            response = connection.getresponse()
            if response.status != 200 or response.readinto(body) != nbytes:
                raise RuntimeError(f"the server answered {response.status}")
            response.read()

        fetch_one()
        if body != expected(nbytes, seed):
            raise RuntimeError("the result differs from what was expected")
        # The server closes connections that are idle for some seconds; the next request opens it again.
        connection.close()
        first.wait()
        while True:
            fetch_one()
            with results.get_lock():
                results.value += 1

    def run(seed: int) -> None:
        try:
            fetch_one_after_another(seed)
        except BaseException as error:
            print(f"a client failed: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def ask(port: int, seconds: float) -> list[float]:
    """Milliseconds of each time that the server was asked for its health."""
    times: list[float] = []
    end = time.perf_counter() + seconds

    def ask_one_after_another() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        # At least once: there are no percentiles of nothing.
        while not times or time.perf_counter() < end:
            begin = time.perf_counter()
            get(connection, "/health")
            times.append((time.perf_counter() - begin) * 1e3)
            time.sleep(PAUSE)
        connection.close()

    with ThreadPoolExecutor(ASKING) as pool:
        for asked in [pool.submit(ask_one_after_another) for _ in range(ASKING)]:
            asked.result()
    return times


def get(connection: http.client.HTTPConnection, path: str) -> bytes:
    connection.request("GET", path)
    response = connection.getresponse()
    body = response.read()
    if response.status != 200:
        raise RuntimeError(f"the server answered {response.status} to {path}")
    return body


def in_flight_at_last(port: int) -> int:
    """What is left once the server has noticed that its clients are gone."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    for _ in range(100):
        in_flight = int(json.loads(get(connection, "/stats"))["in_flight"])
        if in_flight == 0:
            break
        time.sleep(0.05)
    connection.close()
    return in_flight


def table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(HEADER, *rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [HEADER, *rows]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="the health of a server while many clients fetch results")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--mib", type=float, default=16.0, help="size of a result")
    parser.add_argument("--seconds", type=float, default=3.0, help="how long each server is measured")
    parser.add_argument("--server", choices=SERVERS, help="only one of the two")
    parser.add_argument("--json", action="store_true", help="print JSON, with every sample")
    options = parser.parse_args(arguments)
    if not (options.clients > 0 and options.mib > 0 and options.seconds > 0):
        parser.error("--clients, --mib and --seconds must be more than 0")
    if reason := why_not():
        raise SystemExit(reason)
    servers = [options.server] if options.server else SERVERS
    measured = [measure(server, options.clients, int(options.mib * 2**20), options.seconds) for server in servers]
    if options.json:
        print(json.dumps([vars(one) for one in measured]))
        return
    size = f"{options.mib:g} MiB"
    print(f"{options.clients} clients fetch results of {size} from a server that is asked for its health meanwhile\n")
    print(table([one.cells() for one in measured]))
    if emulated():
        print("\nThis is the emulated driver: there is no GPU behind it, and the figures mean nothing.")


if __name__ == "__main__":
    main()
