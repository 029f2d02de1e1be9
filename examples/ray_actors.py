"""The offloader of `kv_offload.py` on Ray actors, each with a device of its own, on one machine or on many.

    python examples/ray_actors.py [--actors 2] [--address auto]

Ray decides where an actor runs and which device it sees; within the actor everything is as before. Its methods are
coroutines on one event loop, so that it goes on answering while it serves: the copies do not hold the loop. At the end
a conversation goes from one actor to another, as an array in Ray's object store, between machines if need be.

Needs Ray: pip install 'aiocuda-copy[ray]'. AIOCUDA_COPY_DRIVER=emulated runs it without a GPU; Ray then counts devices
that are not there, and each actor has an emulated one.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

try:
    import ray
except ImportError:
    sys.exit("this example needs Ray: pip install 'aiocuda-copy[ray]'")

import kv_offload
import numpy as np

# The offloader is an example and in nobody's site-packages: it travels with the actor.
ray.cloudpickle.register_pickle_by_value(kv_offload)


@ray.remote(num_cpus=1, num_gpus=1)
class CacheActor:
    """A device, its cache, and the conversations in it."""

    def __init__(self, pages: int, page_nbytes: int) -> None:
        # Ray shows the actor its own device only, which is therefore the first.
        self._conversations = kv_offload.Conversations(pages, page_nbytes)

    async def device(self) -> str:
        """Which of the cluster's devices this is."""
        return f"{ray.get_runtime_context().get_node_id()[:6]}:{','.join(map(str, ray.get_gpu_ids()))}"

    async def serve(self, turns: int, seed: int) -> str:
        await self._conversations.serve(turns, seed=seed)
        return kv_offload.report(self._conversations)

    async def turn(self, key: str, tokens: int) -> None:
        await self._conversations.turn(key, tokens)

    async def figures(self) -> kv_offload.Figures:
        return self._conversations.offloader.figures

    async def give(self, key: str) -> tuple[np.ndarray, int]:
        return await self._conversations.give(key)

    async def take(self, key: str, content: np.ndarray, tokens: int) -> None:
        # What has come through the object store is read where it lies.
        await self._conversations.take(key, content, tokens)


def start(count: int, pages: int, page_nbytes: int, address: str | None = None) -> list[Any]:
    """Joins a cluster, or makes one of this machine, and starts the actors."""
    if address is not None:
        ray.init(address)
    else:
        # Ray finds real devices by itself, and is told of those that may be emulated.
        told = os.environ.get("AIOCUDA_COPY_DRIVER") in ("emulated", "auto")
        ray.init(num_cpus=count, num_gpus=count if told else None, include_dashboard=False, log_to_driver=False)
    return [CacheActor.remote(pages, page_nbytes) for _ in range(count)]


def demonstrate(actors: list[Any], turns: int) -> None:
    names = ray.get([actor.device.remote() for actor in actors])
    serving = [actor.serve.remote(turns, seed) for seed, actor in enumerate(actors)]
    answers = 0
    while len(ray.wait(serving, num_returns=len(serving), timeout=0)[0]) < len(serving):
        ray.get([actor.figures.remote() for actor in actors])
        answers += 1
    for name, text in zip(names, ray.get(serving), strict=True):
        print(f"device {name}: {text}")
    print(f"while they served, each actor answered {answers} questions")

    here, there = actors[0], actors[-1]
    ray.get(here.turn.remote("a conversation that moves", 20))
    content, tokens = here.give.options(num_returns=2).remote("a conversation that moves")
    ray.get(there.take.remote("a conversation that moves", content, tokens))
    # Compares every byte that has arrived, and goes on.
    ray.get(there.turn.remote("a conversation that moves", 20))
    nbytes = ray.get(content).nbytes
    print(f"a conversation of {nbytes / 1e6:.1f} MB went from {names[0]} to {names[-1]}: every byte is the same")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--actors", type=int, default=2, help="how many, each with a device (2)")
    parser.add_argument("--address", help="of a Ray cluster; by default one of this machine is made and ended")
    parser.add_argument("--pages", type=int, default=256, help="pages on each device, and in host memory (256)")
    parser.add_argument("--page-kib", type=int, default=64, help="KiB of a page (64)")
    parser.add_argument("--turns", type=int, default=192, help="turns of conversations for each (192)")
    arguments = parser.parse_args()
    try:
        actors = start(arguments.actors, arguments.pages, arguments.page_kib << 10, arguments.address)
        demonstrate(actors, arguments.turns)
    finally:
        ray.shutdown()
