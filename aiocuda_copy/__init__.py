"""asyncio-native copies between GPU and host memory."""

import os

from ._blocks import Blocks
from ._copier import Copier
from ._copies import copy_batch, copy_to_device, copy_to_host, synchronize
from ._errors import ClosedError, CudaError, ForkedError
from ._host_functions import (
    HOST_COPY_FN,
    HOST_SIGNAL_FN,
    launch_host_func,
    pack_host_copy_args,
    pack_host_signal_args,
)
from ._pagelock import pinned
from ._pinned import pinned_empty, pinned_empty_async
from ._prefetch import collect, prefetch
from ._stats import CopierStats

if os.environ.get("AIOCUDA_COPY_DRIVER") == "emulated":
    # Under the real one's name, so that it is what cuda.bindings and cuda.core find, whoever makes the first call.
    from .testing._library import load, loaded_driver

    # Where the real one is there already, the first call says so.
    if loaded_driver() is None:
        load()
    del load, loaded_driver
del os

__version__ = "0.1.0"

__all__ = [
    "HOST_COPY_FN",
    "HOST_SIGNAL_FN",
    "Blocks",
    "ClosedError",
    "Copier",
    "CopierStats",
    "CudaError",
    "ForkedError",
    "collect",
    "copy_batch",
    "copy_to_device",
    "copy_to_host",
    "launch_host_func",
    "pack_host_copy_args",
    "pack_host_signal_args",
    "pinned",
    "pinned_empty",
    "pinned_empty_async",
    "prefetch",
    "synchronize",
]
