"""Which of the packages that can be measured beside this one are there."""

from __future__ import annotations

import importlib
import importlib.util

__all__ = ["PEERS", "available", "how_to_install"]

PEERS = ("torch", "cupy", "cuda.core")


# What to install for a package whose name does not say it.
_WHEELS = {
    "cuda.core": "cuda-core",
    "cupy": "cupy-cuda13x (or cupy-cuda12x)",
    "jax": "'aiocuda-copy[jax]'",
    "numba.cuda": "numba-cuda",
    "rmm": "rmm-cu13 (or rmm-cu12)",
    "torch": "'aiocuda-copy[torch]'",
}


def how_to_install(name: str) -> str:
    return f"pip install {_WHEELS.get(name, name)}"


def available(wanted: str | None, *, emulated: bool) -> tuple[frozenset[str], dict[str, str]]:
    """The peers that can be measured, and for each of the others a sentence that says why not.

    Raises
    ------
    ValueError
        A name that is none of them.
    """
    names = [name.strip() for name in (wanted or "").split(",") if name.strip()]
    for name in names:
        if name not in PEERS:
            raise ValueError(f"--peers knows {', '.join(PEERS)}, but not {name!r}")
    missing = {name: why for name in names if (why := _why_not(name, emulated))}
    return frozenset(names) - missing.keys(), missing


def _why_not(name: str, emulated: bool) -> str | None:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # of the package above it
        spec = None
    if spec is None:
        return f"{name} is not installed, so its cases are left out: {how_to_install(name)}"
    if name == "cuda.core":
        return None
    if emulated:
        return f"{name} needs a real device, so its cases are left out."
    try:
        package = importlib.import_module(name)
        usable = package.cuda.is_available()
    except Exception as exc:
        return f"{name} cannot be used ({type(exc).__name__}: {exc}), so its cases are left out."
    return None if usable else f"{name} sees no device, so its cases are left out."
