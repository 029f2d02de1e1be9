"""asyncio-native copies between GPU and host memory."""

from ._host_functions import (
    HOST_COPY_FN,
    HOST_SIGNAL_FN,
    launch_host_func,
    pack_host_copy_args,
    pack_host_signal_args,
)

__all__ = [
    "HOST_COPY_FN",
    "HOST_SIGNAL_FN",
    "launch_host_func",
    "pack_host_copy_args",
    "pack_host_signal_args",
]
