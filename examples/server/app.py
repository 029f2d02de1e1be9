"""A server that computes on a GPU and goes on answering meanwhile.

    python examples/server/app.py [--port 8000] [--blocking]

    GET /result?nbytes=16777216&seed=1    the bytes of a result
    GET /stream?nbytes=16777216&seed=1    the same, copied and sent piece by piece
    GET /health                           nothing; it tells how quickly the loop answers
    GET /stats                            the counters of the copier

``--blocking`` serves results by a copy that blocks the event loop, for comparison. `load_test.py` measures both.
AIOCUDA_COPY_DRIVER=emulated runs it without a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.requests import Request
    from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Route
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
except ModuleNotFoundError as error:
    raise SystemExit(
        f"{str(error.name).partition('.')[0]} is not installed: pip install 'aiocuda-copy[server]'"
    ) from None

import anyio
import anyio.lowlevel
import numpy as np
from model import MAX_NBYTES, MAX_SEED, Model, make_model, why_not

from aiocuda_copy import Copier

# What is sent before the loop gets its turn, and what a streaming response copies at a time.
PIECE_NBYTES = 128 << 10


class Bounded:
    """Requests of a route are so many at a time, take so long at most, and end when their client has gone.

    Whatever a request awaits when it ends is cancelled, and a cancelled copy leaves nothing in flight. For requests
    without a body.
    """

    def __init__(self, app: ASGIApp, at_once: int, seconds: float) -> None:
        self._app = app
        self._at_once, self._seconds = at_once, seconds
        self._limiter: anyio.CapacityLimiter | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._limiter is None:  # it belongs to a loop
            self._limiter = anyio.CapacityLimiter(self._at_once)
        begun = False
        gone = anyio.Event()

        async def notice(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        async def receive_disconnect() -> Message:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def watch(work: anyio.CancelScope) -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            gone.set()
            work.cancel()

        with anyio.move_on_after(self._seconds) as deadline:
            async with anyio.create_task_group() as group:
                group.start_soon(watch, group.cancel_scope)
                async with self._limiter:
                    await self._app(scope, receive_disconnect, notice)
                group.cancel_scope.cancel()
        # Where the answer has begun, the server closes the connection, and the client sees that it is incomplete.
        if deadline.cancelled_caught and not begun:
            await PlainTextResponse("the result took too long", 504)(scope, receive, send)


def make_app(model: Model, *, blocking: bool = False, at_once: int = 8, seconds: float = 60.0) -> Starlette:
    """The application; ``app.state.copier`` is its copier while it runs.

    Parameters
    ----------
    model
        What computes.
    blocking
        Whether results come by a copy that blocks the loop.
    at_once
        Results, and streams, that are under way at a time: so much host memory is used, and the others wait.
    seconds
        The longest that a request may take.
    """
    bounded = [Middleware(Bounded, at_once=at_once, seconds=seconds)]
    app = Starlette(
        routes=[
            Route("/result", result, middleware=bounded),
            Route("/stream", stream, middleware=bounded),
            Route("/health", health),
            Route("/stats", stats),
        ],
        lifespan=lifespan,
    )
    app.state.model, app.state.blocking = model, blocking
    return app


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    async with Copier() as app.state.copier:
        yield


async def result(request: Request) -> Response:
    state = request.app.state
    array = state.model.run(*arguments(request))
    if state.blocking:
        host = state.model.copy_blocking(array)
    else:
        host = await state.copier.copy_to_host(array, stream=state.model.stream)
    return Body(slices(host), len(host))


async def stream(request: Request) -> Response:
    state = request.app.state
    array = state.model.run(*arguments(request))
    # Once the result is there, its chunks need not wait for what others have put into the stream since.
    await state.copier.synchronize(state.model.stream)
    return Body(chunks(state.copier, array), len(array))


async def health(request: Request) -> Response:
    return PlainTextResponse("ok")


async def stats(request: Request) -> Response:
    return JSONResponse(dataclasses.asdict(request.app.state.copier.stats()))


def arguments(request: Request) -> tuple[int, int]:
    try:
        nbytes, seed = int(request.query_params["nbytes"]), int(request.query_params.get("seed", 0))
    except (KeyError, ValueError):
        raise HTTPException(400, "nbytes and seed are whole numbers, and nbytes has to be there") from None
    if not (0 < nbytes <= MAX_NBYTES and 0 <= seed <= MAX_SEED):
        raise HTTPException(400, f"nbytes is between 1 and {MAX_NBYTES}, and seed between 0 and {MAX_SEED}")
    return nbytes, seed


class Body(StreamingResponse):
    """Bytes that are sent as they come, of a length that is known before."""

    media_type = "application/octet-stream"

    def __init__(self, content: AsyncIterator[memoryview], nbytes: int) -> None:
        super().__init__(content, headers={"content-length": str(nbytes)})


async def slices(host: np.ndarray) -> AsyncIterator[memoryview]:
    """An array in host memory, without a copy."""
    for begin in range(0, len(host), PIECE_NBYTES):
        yield memoryview(host[begin : begin + PIECE_NBYTES])
        # A socket with much room takes slice after slice, and nobody else would get a turn.
        await anyio.lowlevel.checkpoint()


async def chunks(copier: Copier, array: Any) -> AsyncIterator[memoryview]:
    """An array in device memory: the next chunk is copied when the server asks for it, which is when it can send.

    Each chunk is a new array, whose page-locked memory goes back to the pool when the server has let go of it. That may
    be after the next chunk was asked for, which is why there is none here that is filled again and again.
    """
    for begin in range(0, len(array), PIECE_NBYTES):
        # In a stream in which nobody works.
        yield memoryview(await copier.copy_to_host(array[begin : begin + PIECE_NBYTES], stream=0))


def serve(listener: socket.socket, **options: Any) -> None:
    """Serves connections of a listening socket until the process is told to end."""
    app = make_app(make_model(), **options)
    # What has been imported is not garbage, and to look through it again and again would hold up every request.
    gc.collect()
    gc.freeze()
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5)
    uvicorn.Server(config).run(sockets=[listener])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="a server that computes on a GPU")
    parser.add_argument("--port", type=int, default=8000, help="0 takes any (default: 8000)")
    parser.add_argument("--blocking", action="store_true", help="copy results by a call that blocks the event loop")
    options = parser.parse_args(arguments)
    if reason := why_not():
        raise SystemExit(reason)
    with socket.create_server(("127.0.0.1", options.port)) as listener:
        print(f"http://127.0.0.1:{listener.getsockname()[1]}/health", flush=True)
        serve(listener, blocking=options.blocking)


if __name__ == "__main__":
    main()
