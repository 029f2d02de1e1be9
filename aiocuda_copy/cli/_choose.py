"""Which driver a command uses."""

from __future__ import annotations

import os

from ..testing import use_emulated_driver
from ..testing._library import refuse_real_driver
from ..testing._probe import from_environment, resolve

__all__ = ["EMULATED_NOTICE", "choose_driver"]

EMULATED_NOTICE = """\
THIS IS THE EMULATED DRIVER: there is no GPU behind it. It shows that the code works; its figures mean nothing."""


def choose_driver(wanted: str) -> bool:
    """Sets the process up for a driver: "real", "emulated" or "auto". Returns whether it is the emulated one.

    Raises
    ------
    ValueError
        If the environment names a driver that there is not, or has put the emulated one in the real one's place.
    """
    if wanted == "auto":
        wanted = from_environment() or resolve("auto")
    if wanted == "real":
        refuse_real_driver()
    os.environ["AIOCUDA_COPY_DRIVER"] = wanted
    if wanted == "emulated":
        use_emulated_driver()
    return wanted == "emulated"
