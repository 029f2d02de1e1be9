"""A decode step of a language model, by torch, for what goes on beside it.

The shapes are those of Llama 3.1 8B in bfloat16: 32 heads and 8 of keys and values, of 128 each, a width of 4,096 and
14,336 between. The weights are random, and eight layers stand for the 32: at 3.5 GB they are far more than the device
keeps in its cache. 64 sequences have 1,024 tokens each. The step is replayed as a CUDA graph, as servers do it.
"""

from __future__ import annotations

import time
from typing import Any

__all__ = ["Model"]

_LAYERS, _WIDTH, _BETWEEN = 8, 4096, 14336
_HEADS, _KV_HEADS, _HEAD = 32, 8, 128
_SEQUENCES, _TOKENS = 64, 1024
_STEPS = 150


class Model:
    """Decodes on a stream of its own: a call decodes 150 tokens of each sequence, blocks, and returns its seconds."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._stream = torch.cuda.Stream()

        def random(*shape: int) -> Any:
            return torch.randn(shape, dtype=torch.bfloat16, device="cuda") * 0.02

        with torch.cuda.stream(self._stream), torch.no_grad():
            self._layers = [
                (
                    random((_HEADS + 2 * _KV_HEADS) * _HEAD, _WIDTH),
                    random(_WIDTH, _HEADS * _HEAD),
                    random(2 * _BETWEEN, _WIDTH),
                    random(_WIDTH, _BETWEEN),
                    random(_SEQUENCES, _KV_HEADS, _TOKENS, _HEAD),
                    random(_SEQUENCES, _KV_HEADS, _TOKENS, _HEAD),
                )
                for _ in range(_LAYERS)
            ]
            self._tokens = random(_SEQUENCES, _WIDTH)
            self._turn = random(_HEAD)
            self._step()
            self._stream.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=self._stream):
                self._step()
        self()

    def __call__(self) -> float:
        begin = time.perf_counter()
        with self._torch.cuda.stream(self._stream):
            for _ in range(_STEPS):
                self._graph.replay()
        self._stream.synchronize()
        return time.perf_counter() - begin

    def _step(self) -> Any:
        functional = self._torch.nn.functional
        x = self._tokens
        for qkv, out, gate_up, down, keys, values in self._layers:
            normed = functional.rms_norm(x, (_WIDTH,))
            heads = functional.linear(normed, qkv).view(_SEQUENCES, _HEADS + 2 * _KV_HEADS, _HEAD)
            query, key, value = heads.split((_HEADS, _KV_HEADS, _KV_HEADS), 1)
            query, key = self._rotated(query), self._rotated(key)
            keys[:, :, -1], values[:, :, -1] = key, value
            attended = functional.scaled_dot_product_attention(query[:, :, None], keys, values, enable_gqa=True)
            x = x + functional.linear(attended.reshape(_SEQUENCES, _HEADS * _HEAD), out)
            gate, up = functional.linear(functional.rms_norm(x, (_WIDTH,)), gate_up).chunk(2, -1)
            x = x + functional.linear(functional.silu(gate) * up, down)
        return x

    def _rotated(self, x: Any) -> Any:
        """By the token's place, which is the same for all here."""
        half = _HEAD // 2
        swapped = self._torch.cat((-x[..., half:], x[..., :half]), -1)
        return x * self._turn + swapped * self._turn
