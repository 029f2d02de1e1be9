"""All cases, in the order in which they are run."""

from __future__ import annotations

import importlib

__all__: list[str] = []

for _name in ("_bulk", "_batches", "_latency", "_beside", "_torch", "_extremes", "_cupy", "_cuda_core"):
    importlib.import_module(f".{_name}", __package__)
