"""asyncio-native copies between GPU and host memory."""

from ._copies import Copier, CopierStats, copy_batch, copy_to_device, copy_to_host, synchronize
from ._errors import ClosedError, CudaError, ForkedError
from ._pagelock import pinned
from ._pinned import pinned_empty, pinned_empty_async

__all__ = [
    "ClosedError",
    "Copier",
    "CopierStats",
    "CudaError",
    "ForkedError",
    "copy_batch",
    "copy_to_device",
    "copy_to_host",
    "pinned",
    "pinned_empty",
    "pinned_empty_async",
    "synchronize",
]
