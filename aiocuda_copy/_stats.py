"""The counters of a copier."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CopierStats"]


@dataclass(frozen=True)
class CopierStats:
    """Counters of a copier, all since it was made.

    Attributes
    ----------
    submitted, completed, failed, cancelled : int
        Operations: a copy, a batch or a synchronisation each count as one, what was refused or empty as none.
    in_flight : int
        Operations that the library has not yet let go of, also those whose await was cancelled.
    nbytes_direct, nbytes_staged, nbytes_small, nbytes_between_devices : int
        Bytes by path: to and from page-locked memory, through slots and workers, through small slots, and between
        device buffers. They grow when the stream has reached the copy.
    nbytes_in_stream : int
        Bytes that were enqueued in the caller's own stream.
    slots_in_use : int
        Staging slots that hold data now.
    slots_held_nbytes : int
        Page-locked bytes of all slots of the devices that the copier used, shared with every other copier.
    pinned_held_nbytes : int
        Page-locked bytes that the pool for results holds, in use or not.
    inline_completions, parked_completions : int
        Operations that finished inside the call, and those that were resolved by the loop.
    worker_busy_seconds : float
        Time that the worker threads spent on this copier's copies, added up.
    """

    submitted: int
    completed: int
    failed: int
    cancelled: int
    in_flight: int
    nbytes_direct: int
    nbytes_staged: int
    nbytes_small: int
    nbytes_between_devices: int
    nbytes_in_stream: int
    slots_in_use: int
    slots_held_nbytes: int
    pinned_held_nbytes: int
    inline_completions: int
    parked_completions: int
    worker_busy_seconds: float
