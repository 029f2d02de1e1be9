"""The server of the examples: its bytes, its bounds, and that a request leaves nothing in flight however it ends."""

from __future__ import annotations

import asyncio
import gc
import importlib
import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from calls import calls, until

from aiocuda_copy._pinned import default_pool
from aiocuda_copy.cli.bench import _server
from aiocuda_copy.cli.bench._registry import Skipped
from aiocuda_copy.testing import Emulator, emulated

httpx = pytest.importorskip("httpx")
uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

EXAMPLE = Path(__file__).parents[1] / "examples" / "server"
sys.path.append(str(EXAMPLE))
server = importlib.import_module("app")
models = importlib.import_module("model")
load_test = importlib.import_module("load_test")

MIB = 1 << 20
PIECE = server.PIECE_NBYTES
PATHS = ("/result", "/stream")
# Much more than the sockets of both sides hold together.
LONG = 16 * MIB
SOCKET_NBYTES = 256 << 10


@pytest.fixture(scope="module")
def model() -> Any:
    if not emulated():
        pytest.importorskip("torch")
    return models.make_model()


class Watched:
    """The application, with how many requests are under way and how much page-locked memory their bodies use."""

    def __init__(self, model: Any, **options: Any) -> None:
        self.app = server.make_app(model, **options)
        self.under_way = 0
        self.most_nbytes = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return

        async def measure(message: Any) -> None:
            self.most_nbytes = max(self.most_nbytes, default_pool().stats().in_use_nbytes)
            await send(message)

        self.under_way += 1
        try:
            await self.app(scope, receive, measure)
        finally:
            self.under_way -= 1

    @property
    def stats(self) -> Any:
        return self.app.state.copier.stats()

    async def idle(self) -> None:
        """Waits until no request is under way, and the engine has let go of what was cancelled."""
        await until(lambda: self.under_way == 0 and self.stats.in_flight == 0)


def query(nbytes: int, seed: int = 1) -> str:
    return f"?nbytes={nbytes}&seed={seed}"


@asynccontextmanager
async def client_of(watched: Watched, **options: Any) -> AsyncIterator[Any]:
    """A client that calls the application itself."""
    transport = httpx.ASGITransport(watched, **options)
    async with (
        watched.app.router.lifespan_context(watched.app),
        httpx.AsyncClient(transport=transport, base_url="http://server") as client,
    ):
        yield client


@pytest.mark.parametrize("nbytes", [1, 4099, PIECE, 3 * PIECE + 5])
@pytest.mark.parametrize("path", PATHS)
async def test_the_bytes(gpu: Emulator | None, model: Any, path: str, nbytes: int) -> None:
    watched = Watched(model)
    async with client_of(watched) as client:
        for seed in (0, 1, 250, 251, models.MAX_SEED):
            response = await client.get(path + query(nbytes, seed))
            assert response.status_code == 200
            assert int(response.headers["content-length"]) == nbytes
            assert response.content == models.expected(nbytes, seed)
        assert watched.stats.in_flight == 0


async def test_the_blocking_twin_has_the_same_bytes(gpu: Emulator | None, model: Any) -> None:
    watched = Watched(model, blocking=True)
    async with client_of(watched) as client:
        assert (await client.get("/result" + query(5 * PIECE))).content == models.expected(5 * PIECE, 1)
        assert watched.stats.submitted == 0


async def test_health_and_stats(gpu: Emulator | None, model: Any) -> None:
    async with client_of(Watched(model)) as client:
        await client.get("/result" + query(PIECE))
        assert (await client.get("/health")).text == "ok"
        assert (await client.get("/stats")).json()["completed"] == 1


@pytest.mark.parametrize(
    "bad",
    [
        *("", "?nbytes=x", "?nbytes=0", "?nbytes=1&seed=-1"),
        query(models.MAX_NBYTES + 1),
        *(query(1, seed) for seed in (models.MAX_SEED + 1, 2**63 - 1, 2**63)),
    ],
)
@pytest.mark.parametrize("path", PATHS)
async def test_bad_arguments(gpu: Emulator | None, model: Any, path: str, bad: str) -> None:
    async with client_of(Watched(model)) as client:
        response = await client.get(path + bad)
        assert response.status_code == 400
        assert "nbytes" in response.text
        assert "seed" in response.text


@pytest.mark.parametrize("path", PATHS)
async def test_a_request_that_takes_too_long(emulated_gpu: Emulator, model: Any, path: str) -> None:
    watched = Watched(model, seconds=0.05)
    emulated_gpu.hold(model.stream)
    async with client_of(watched) as client:
        response = await client.get(path + query(MIB))
        assert response.status_code == 504
        # The stream is still held: nothing but the time ended the request.
        await watched.idle()
        assert watched.stats.cancelled == 1


@pytest.mark.parametrize("path", PATHS)
async def test_a_fault_of_the_device_is_an_error_of_the_server(emulated_gpu: Emulator, model: Any, path: str) -> None:
    watched = Watched(model)
    emulated_gpu.fail_operation("kernel")
    emulated_gpu.hold(model.stream)
    async with client_of(watched, raise_app_exceptions=False) as client, calls() as start:
        call = start(client.get(path + query(MIB)))
        await until(lambda: watched.under_way == 1 and watched.stats.in_flight == 1)
        emulated_gpu.release(model.stream)
        assert (await call.result()).status_code == 500
        assert (await client.get("/health")).text == "ok"
        await watched.idle()
        assert watched.stats.failed == 1
        emulated_gpu.reset()  # what fails for good would fail the next test


@pytest.mark.parametrize("path", PATHS)
async def test_the_loop_answers_while_requests_wait_and_only_so_many_begin(
    emulated_gpu: Emulator, model: Any, path: str
) -> None:
    watched = Watched(model, at_once=2)
    emulated_gpu.hold(model.stream)
    async with client_of(watched) as client, calls() as start:
        waiting = [start(client.get(path + query(MIB, seed))) for seed in range(5)]
        await until(lambda: watched.under_way == 5 and watched.stats.in_flight == 2)
        assert (await client.get("/health")).text == "ok"
        assert watched.stats.submitted == 2
        emulated_gpu.release(model.stream)
        for seed, call in enumerate(waiting):
            assert (await call.result()).content == models.expected(MIB, seed)
        assert watched.stats.in_flight == 0


@asynccontextmanager
async def served(watched: Watched) -> AsyncIterator[int]:
    """The port of a uvicorn that serves the application in this loop."""
    serving = uvicorn.Server(uvicorn.Config(watched, lifespan="on", log_config=None))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        # What it accepts has the same.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_NBYTES)
        task = asyncio.create_task(serving.serve(sockets=[listener]))
        try:
            await until(lambda: serving.started or task.done())
            yield listener.getsockname()[1]
        finally:
            serving.should_exit = True
            await task


class Client:
    """A client that reads no more than it is told to, and may break off."""

    @classmethod
    async def get(cls, port: int, path: str) -> Client:
        client = cls()
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_NBYTES)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
        client.reader, client.writer = await asyncio.open_connection(sock=connection)
        client.writer.write(f"GET {path} HTTP/1.1\r\nHost: server\r\nConnection: close\r\n\r\n".encode())
        return client

    async def head(self) -> bytes:
        return await self.reader.readuntil(b"\r\n\r\n")

    async def close(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()

    def break_off(self) -> None:
        self.writer.transport.abort()


@pytest.mark.asyncio_only
@pytest.mark.parametrize("path", PATHS)
async def test_over_sockets(gpu: Emulator | None, model: Any, path: str) -> None:
    watched = Watched(model)
    async with served(watched) as port:
        clients = [await Client.get(port, path + query(4 * MIB + 3, seed)) for seed in range(10)]
        for seed, client in enumerate(clients):
            assert b"200 OK" in await client.head()
            assert await client.reader.readexactly(4 * MIB + 3) == models.expected(4 * MIB + 3, seed)
            await client.close()
        await watched.idle()


@pytest.mark.asyncio_only
@pytest.mark.parametrize("path", PATHS)
async def test_a_client_that_goes_while_the_gpu_computes(emulated_gpu: Emulator, model: Any, path: str) -> None:
    watched = Watched(model)
    emulated_gpu.hold(model.stream)
    async with served(watched) as port:
        client = await Client.get(port, path + query(MIB))
        await until(lambda: watched.stats.in_flight == 1)
        client.break_off()
        # The stream is still held: nothing but the client's going ends the request.
        await watched.idle()
        assert watched.stats.cancelled == 1


@pytest.mark.asyncio_only
@pytest.mark.parametrize("path", PATHS)
async def test_a_client_that_goes_in_the_middle_of_a_body(gpu: Emulator | None, model: Any, path: str) -> None:
    watched = Watched(model)
    gc.collect()
    before = default_pool().stats().in_use_nbytes
    async with served(watched) as port:
        client = await Client.get(port, path + query(LONG))
        await client.head()
        await client.reader.readexactly(2 * MIB)
        assert watched.under_way == 1
        client.break_off()
        await watched.idle()
        if path == "/stream":
            assert watched.stats.completed < LONG // PIECE
    gc.collect()
    assert default_pool().stats().in_use_nbytes == before


@pytest.mark.asyncio_only
async def test_a_client_that_goes_while_a_chunk_is_copied(emulated_gpu: Emulator, model: Any) -> None:
    watched = Watched(model)
    legacy_stream = 1
    emulated_gpu.hold(legacy_stream)
    emulated_gpu.kernel(legacy_stream)
    async with served(watched) as port:
        client = await Client.get(port, "/stream" + query(MIB))
        await client.head()
        await until(lambda: watched.stats.in_flight == 1)
        client.break_off()
        await watched.idle()
        assert watched.stats.cancelled == 1
        assert watched.stats.nbytes_direct == 0


@pytest.mark.asyncio_only
async def test_a_client_that_does_not_read_is_cut_off_in_time(gpu: Emulator | None, model: Any) -> None:
    watched = Watched(model, seconds=0.2)
    async with served(watched) as port:
        client = await Client.get(port, "/stream" + query(LONG))
        await client.head()
        await watched.idle()
        body = await client.reader.read()
        assert len(body) < LONG
        assert models.expected(LONG, 1).startswith(body)
        await client.close()


@pytest.mark.asyncio_only
async def test_a_stream_uses_a_few_chunks_of_page_locked_memory(gpu: Emulator | None, model: Any) -> None:
    watched = Watched(model)
    gc.collect()
    before = default_pool().stats().in_use_nbytes
    async with served(watched) as port:
        client = await Client.get(port, "/stream" + query(LONG))
        await client.head()
        assert await client.reader.readexactly(LONG) == models.expected(LONG, 1)
        await client.close()
        await watched.idle()
    assert 0 < watched.most_nbytes - before <= 3 * PIECE


def run(script: str, *arguments: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a script of the example, or code that is given its path."""
    path = os.pathsep.join([str(EXAMPLE), *filter(None, sys.path)])
    driver = "emulated" if emulated() else "real"
    return subprocess.run(
        [sys.executable, *(["-c", code] if code else []), str(EXAMPLE / script), *arguments],
        env={**os.environ, "AIOCUDA_COPY_DRIVER": driver, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_load_test(model: Any) -> None:
    done = run("load_test.py", "--clients", "4", "--mib", "0.5", "--seconds", "0.5")
    assert done.returncode == 0, done.stdout + done.stderr
    header, awaited, blocking = done.stdout.splitlines()[2:5]
    assert "p50 ms" in header
    assert "p99 ms" in header
    for name, row in (("awaited", awaited), ("blocking", blocking)):
        cells = row.split()
        assert cells[0] == name
        assert int(cells[1]) > 0
        middle, late, most = map(float, cells[4:7])
        assert 0 < middle <= late <= most
        assert cells[7] == "0"
    assert ("figures mean nothing" in done.stdout) is emulated()


@pytest.mark.parametrize("option", ["--clients", "--mib", "--seconds"])
def test_a_load_test_of_nothing(capsys: pytest.CaptureFixture[str], option: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        load_test.main([option, "0"])
    assert option in capsys.readouterr().err.splitlines()[-1]


def test_the_shortest_load_test_asks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_test, "get", lambda connection, path: b"")
    assert load_test.ask(0, 1e-9)


# Runs a script as if a package were not installed.
WITHOUT = """
import runpy, sys
sys.modules[sys.argv[2]] = None
sys.argv = sys.argv[1:2]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("package", ["starlette", "uvicorn"])
@pytest.mark.parametrize("script", ["app.py", "load_test.py"])
def test_a_package_that_is_missing(script: str, package: str) -> None:
    done = run(script, package, code=WITHOUT)
    assert done.returncode == 1
    assert done.stderr.strip() == f"{package} is not installed: pip install 'aiocuda-copy[server]'"


def test_a_real_gpu_needs_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "emulated", lambda: False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "needs torch" in models.why_not()
    with pytest.raises(RuntimeError, match="needs torch"):
        models.make_model()


@pytest.mark.asyncio_only
@pytest.mark.parametrize("missing", ["starlette", "uvicorn", "torch"])
async def test_the_bench_says_what_it_misses(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    class Machine:
        emulated = False
        beside_seconds = 0.1

    machine: Any = Machine()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else object())
    sentence = "torch, which is not installed" if missing == "torch" else rf"{missing} is not .*aiocuda-copy\[server\]"
    with pytest.raises(Skipped, match=sentence):
        await _server.awaited(machine)


@pytest.mark.asyncio_only
async def test_the_bench_says_that_there_is_no_source_tree(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_server, "__file__", str(tmp_path / "aiocuda_copy" / "cli" / "bench" / "_server.py"))
    monkeypatch.chdir(tmp_path)
    machine: Any = None
    with pytest.raises(Skipped, match="source tree"):
        await _server.blocking(machine)
