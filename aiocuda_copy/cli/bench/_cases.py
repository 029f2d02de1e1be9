"""All cases, in the order in which they are run."""

from __future__ import annotations

import importlib

__all__: list[str] = []

_MODULES = (
    "_bulk",
    "_batches",
    "_crossovers",
    "_latency",
    "_beside",
    "_loader",
    "_torch",
    "_extremes",
    "_offload",
    "_server",
    "_cupy",
    "_cuda_core",
    "_frameworks",
)
for _name in _MODULES:
    importlib.import_module(f".{_name}", __package__)
