"""Page-locked host memory that is pooled: a hit makes no driver call, and growing never holds a driver lock for long.

There are no locks, because the last view of an array may go in a garbage collection, in a signal handler, in any
thread, and in the middle of anything. A block goes home by ``deque.append`` and comes out by ``deque.pop``; sums are
kept by methods of compiled code, which nothing interrupts.

Memory comes in slabs, one mapping and one registration each; no block spans two, for the driver refuses a copy that
does. A large slab is one block, a small one is cut into blocks of one size.
"""

from __future__ import annotations

import math
import operator
import os
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np
from numpy.typing import DTypeLike

from . import _driver, _native
from ._errors import ClosedError
from ._pagelock import context_device, pinned
from ._threads import once

__all__ = ["PinnedPool", "PoolStats", "default_limit", "default_pool", "pinned", "pinned_empty", "pinned_empty_async"]

_PAGE = 4096
_SLAB = 2 << 20
_PORTABLE = 1
# Zeroing more than this on a loop's thread would be felt: 0.1 ms.
_ZERO_INLINE = 1 << 20

Shape = SupportsIndex | Sequence[SupportsIndex]
_Token = tuple["_Slab", int]


@dataclass(frozen=True, slots=True)
class PoolStats:
    """The state of a pool at a moment, and what has happened since it was made.

    Attributes
    ----------
    limit_nbytes : int
        How much it may hold; less than it was given after the driver has refused to pin more.
    held_nbytes, in_use_nbytes : int
        How much is page-locked, and how much of that belongs to arrays that are alive.
    hits, misses : int
        Requests that were served from free memory, and requests for which the pool had to grow.
    refusals : int
        Requests that could not be served, for the limit or because the driver refused.
    """

    limit_nbytes: int
    held_nbytes: int
    in_use_nbytes: int
    hits: int
    misses: int
    refusals: int


class _Slab:
    """One mapping and one registration."""

    __slots__ = ("address", "block_nbytes", "device", "nbytes")

    def __init__(self, address: int, nbytes: int, block_nbytes: int, device: int) -> None:
        self.address, self.nbytes, self.block_nbytes, self.device = address, nbytes, block_nbytes, device

    def blocks(self) -> Iterable[_Token]:
        for address in range(self.address, self.address + self.nbytes - self.block_nbytes + 1, self.block_nbytes):
            yield self, address


def size_class(nbytes: int) -> int:
    """The size of the block for a request.

    A power of two up to 2 MiB; from there on the waste is an eighth of the request, or 2 MiB where that is more.
    """
    if nbytes <= _PAGE:
        return _PAGE
    bits = (nbytes - 1).bit_length()
    if nbytes <= _SLAB:
        return 1 << bits
    step = max(_SLAB, 1 << (bits - 4))
    return -(-nbytes // step) * step


class PinnedPool:
    """A pool of page-locked memory.

    Parameters
    ----------
    limit_nbytes
        How much it may hold, free memory included; ``None`` means :func:`default_limit`.
    zero_on_reuse
        Whether memory that has been used before is zeroed before it is handed out again.
    """

    def __init__(self, limit_nbytes: int | None = None, *, zero_on_reuse: bool = False) -> None:
        self._slabs: set[_Slab] = set()
        limit = default_limit() if limit_nbytes is None else operator.index(limit_nbytes)
        if limit < 0:
            raise ValueError(f"the limit of a pool must not be negative, but it is {limit}")
        self._account = _native.PoolAccount(limit)
        self._free: dict[int, deque[_Token]] = {}
        self._zero_on_reuse = zero_on_reuse
        self._closed = False
        _pools.add(self)

    # Arrays.

    def try_empty(self, shape: Shape, dtype: DTypeLike = np.uint8) -> np.ndarray[Any, np.dtype[Any]] | None:
        """An array from memory that is free already, without any driver call; ``None`` where there is none.

        It may then be had from :meth:`empty`, which may take long, or from the pageable heap.
        """
        dimensions, kind, nbytes = _measure(shape, dtype)
        if nbytes == 0:
            return np.empty(dimensions, kind)
        block = self.try_block(nbytes)
        return None if block is None else _array(dimensions, kind, block)

    def empty(self, shape: Shape, dtype: DTypeLike = np.uint8, *, device: int = -1) -> np.ndarray[Any, np.dtype[Any]]:
        """An array of the pool, which grows where it must; that takes some 25 to 300 ms per GiB.

        Parameters
        ----------
        shape, dtype
            As of :func:`numpy.empty`; the contents are arbitrary.
        device
            In whose primary context new memory is page-locked, for the use of all contexts; -1 means that of the
            current context, else the one that was used before, else 0.

        Raises
        ------
        MemoryError
            Where the limit, the driver or the system does not allow more.
        """
        dimensions, kind, nbytes = _measure(shape, dtype)
        if nbytes == 0:
            return np.empty(dimensions, kind)
        return _array(dimensions, kind, self.block(nbytes, device=device))

    async def empty_async(
        self, shape: Shape, dtype: DTypeLike = np.uint8, *, device: int = -1
    ) -> np.ndarray[Any, np.dtype[Any]]:
        """As :meth:`empty`, but growing does not hold the event loop."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        found = self.try_empty(shape, dtype)
        if found is not None:
            return found
        # The worker thread has no current context to ask.
        device = context_device(device)
        # Not as the thread's result, for the thread may hold on to that until its next job.
        grown: list[np.ndarray[Any, np.dtype[Any]]] = []
        wanted = True

        def grow() -> None:
            grown.append(self.empty(shape, dtype, device=device))
            if not wanted:
                grown.clear()

        try:
            # A limiter of its own, for the default one may be full of threads that wait for this one.
            await anyio.to_thread.run_sync(once(grow), abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1))
            return grown.pop()
        except BaseException:
            wanted = False
            grown.clear()
            raise

    # Blocks.

    def try_block(self, nbytes: int) -> _native.HostBlock | None:
        """As :meth:`try_empty`: at least ``nbytes`` bytes as an object with the buffer protocol."""
        if self._zero_on_reuse and nbytes > _ZERO_INLINE:
            self._check()
            return None
        return self._take(nbytes)

    def block(self, nbytes: int, *, device: int = -1) -> _native.HostBlock:
        """As :meth:`empty`: at least ``nbytes`` bytes as an object with the buffer protocol."""
        found = self._take(nbytes)
        if found is None:
            self._account.miss()
            wanted = size_class(nbytes)
            slab, address = self._grow(wanted, device)
            found = _native.HostBlock(address, nbytes, self._home(wanted).append, (slab, address))
        return found

    def _check(self) -> None:
        _driver.ensure()
        if self._closed:
            raise ClosedError("the pool of page-locked memory has been closed")

    def _home(self, block_nbytes: int) -> deque[_Token]:
        return self._free.get(block_nbytes) or self._free.setdefault(block_nbytes, deque())

    def _take(self, nbytes: int) -> _native.HostBlock | None:
        self._check()
        wanted = size_class(nbytes)
        free = self._free.get(wanted)
        if not free and wanted >= _SLAB:
            # A free block that is a quarter too large is better than growing.
            larger = (size for size, blocks in self._free.copy().items() if blocks and size > wanted)
            free = self._free[size] if (size := min(larger, default=0)) and size <= wanted + wanted // 4 else None
        if not free:
            return None
        try:
            token = free.pop()
        except IndexError:  # another thread was first
            return None
        self._account.hit()
        if self._zero_on_reuse:
            _native.zero_host(token[1], nbytes)
        return _native.HostBlock(token[1], nbytes, free.append, token)

    # Growing and shrinking.

    def _grow(self, block_nbytes: int, device: int) -> _Token:
        _sweep()
        account = self._account
        for nbytes in (max(block_nbytes, _SLAB), block_nbytes):
            if account.reserve(nbytes):
                break
        else:
            self.trim(block_nbytes)
            if not account.reserve(nbytes):
                account.refuse()
                now = self.stats()
                raise MemoryError(
                    f"the pool of page-locked memory cannot grow by {block_nbytes} bytes: it holds {now.held_nbytes} "
                    f"of at most {now.limit_nbytes}, {now.in_use_nbytes} of them in use; drop arrays or raise the limit"
                )
        device = context_device(device)
        address = _native.map_host(nbytes)
        if not address:
            account.shrink(nbytes)
            account.refuse()
            raise MemoryError(f"the system has no {nbytes} bytes of memory for the pool of page-locked memory")
        code = _native.host_register(address, nbytes, _PORTABLE, device)
        if code:
            _native.unmap_host(address, nbytes)
            account.refuse()
            failure = _driver.error(code, "cuMemHostRegister")
            if failure.sticky:
                account.release(nbytes)
                raise failure
            account.shrink(nbytes)
            raise MemoryError(
                f"the driver does not page-lock {nbytes} bytes more ({failure.name}); the pool's limit is now "
                f"{account.limit_nbytes} bytes, of which it holds {account.held_nbytes}"
            ) from failure
        slab = _Slab(address, nbytes, block_nbytes, device)
        self._slabs.add(slab)
        if self._closed:  # meanwhile
            _closed_pools.append(self)
        first, *others = slab.blocks()
        self._home(block_nbytes).extend(others)
        return first

    def trim(self, nbytes: int | None = None) -> int:
        """Gives free memory back to the system.

        Parameters
        ----------
        nbytes
            How much, if there is as much; ``None`` means all.

        Returns
        -------
        int
            How much it was.
        """
        released = 0
        sizes = sorted(self._free.copy())
        if nbytes is not None:
            # The smallest block that is enough; else the largest ones.
            sizes = [size for size in sizes if size >= nbytes] + [size for size in reversed(sizes) if size < nbytes]
        for size in sizes:
            if nbytes is not None and released >= nbytes:
                break
            released += self._trim_class(size, self._free[size], None if nbytes is None else nbytes - released)
        return released

    def _trim_class(self, block_nbytes: int, free: deque[_Token], nbytes: int | None) -> int:
        released = 0
        parts: dict[_Slab, list[_Token]] = {}
        while nbytes is None or released < nbytes:
            try:
                token = free.popleft()  # the one that has been free for longest
            except IndexError:
                break
            slab = token[0]
            part = parts.setdefault(slab, [])
            part.append(token)
            if len(part) * block_nbytes + block_nbytes > slab.nbytes:
                del parts[slab]
                if not self._release(slab):
                    break
                released += slab.nbytes
        for part in parts.values():
            free.extendleft(part)
        return released

    def _release(self, slab: _Slab) -> bool:
        # Memory that the driver does not let go of is kept for good: the device might still write to it.
        if _native.host_unregister(slab.address, slab.device):
            return False
        self._slabs.discard(slab)
        _native.unmap_host(slab.address, slab.nbytes)
        self._account.release(slab.nbytes)
        return True

    def __del__(self) -> None:
        # No driver call may be made wherever it is dropped; the growth of another pool empties it.
        self._closed = True
        if self._slabs and _closed_pools is not None:  # as it is when the interpreter ends
            _closed_pools.append(self)

    def close(self) -> None:
        """Gives free memory back; what is in use follows some time after its arrays are gone."""
        self._closed = True
        self.trim()
        if self._slabs:
            _closed_pools.append(self)

    # Figures.

    @property
    def limit_nbytes(self) -> int:
        return self._account.limit_nbytes

    @limit_nbytes.setter
    def limit_nbytes(self, limit_nbytes: int) -> None:
        self._account.set_limit(operator.index(limit_nbytes))

    def stats(self) -> PoolStats:
        """The pool's state and counters."""
        account = self._account
        free = sum(size * len(blocks) for size, blocks in self._free.copy().items())
        # The end of a slab that its size of blocks does not fill counts as free.
        rest = sum(slab.nbytes % slab.block_nbytes for slab in self._slabs.copy())
        held = account.held_nbytes
        return PoolStats(
            account.limit_nbytes,
            held,
            max(held - free - rest, 0),
            account.hits,
            account.misses,
            account.refusals,
        )

    def _slabs_in_use(self) -> list[_Slab]:
        free: dict[_Slab, int] = {}
        for blocks in self._free.copy().values():
            for slab, _ in blocks.copy():
                free[slab] = free.get(slab, 0) + 1
        return [slab for slab in self._slabs.copy() if free.get(slab, 0) < slab.nbytes // slab.block_nbytes]


def _array(shape: tuple[int, ...], dtype: np.dtype[Any], block: Any) -> np.ndarray[Any, np.dtype[Any]]:
    return np.ndarray(shape, dtype, block)


def _measure(shape: Shape, dtype: DTypeLike) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    kind = np.dtype(dtype)
    if kind.hasobject:
        raise TypeError(f"page-locked memory cannot hold Python objects ({kind})")
    dimensions = (
        tuple(map(operator.index, shape))
        if isinstance(shape, (tuple, Sequence, np.ndarray))
        else (operator.index(shape),)
    )
    if dimensions and min(dimensions) < 0:
        raise ValueError(f"negative dimensions are not allowed, but the shape is {dimensions}")
    return dimensions, kind, math.prod(dimensions) * kind.itemsize


# Pools, for forks; and pools that were closed while arrays of theirs were alive, which the growth of others empties.
_pools: weakref.WeakSet[PinnedPool] = weakref.WeakSet()
_closed_pools: deque[PinnedPool] = deque()
_inherited: list[_Slab] = []


def _sweep() -> None:
    for _ in range(len(_closed_pools)):
        try:
            pool = _closed_pools.popleft()
        except IndexError:
            return
        pool.trim()
        if pool._slabs:
            _closed_pools.append(pool)


def _before_fork() -> None:
    """Arrays that are alive are copied for the child, who may read them; free memory, maybe gigabytes, is not."""
    for pool in {*_pools, *_closed_pools.copy()}:
        for slab in pool._slabs_in_use():
            _native.inherit_host(slab.address, slab.nbytes, True)
            _inherited.append(slab)


def _after_fork() -> None:
    while _inherited:
        slab = _inherited.pop()
        _native.inherit_host(slab.address, slab.nbytes, False)


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork)


def default_limit() -> int:
    """A quarter of what this process may have of memory: of the machine's, or of the smallest of its control groups'.

    ``RLIMIT_MEMLOCK`` is not among them: the driver pins without asking it (an unprivileged process with a limit of
    64 KiB registered 1 GiB), and where something else refuses, the pool finds out and shrinks.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([memory, *_cgroup_limits()]) // 4


def _cgroup_limits(root: str = "/") -> list[int]:
    limits = []
    for directory, name in _cgroup_directories(root):
        while True:
            try:
                with open(f"{root}sys/fs/cgroup{directory}/{name}") as file:
                    limits.append(int(file.read()))
            except (OSError, ValueError):  # "max", or nothing there
                pass
            if directory in ("", "/memory"):
                break
            directory = directory.rpartition("/")[0]
    return limits


def _cgroup_directories(root: str) -> list[tuple[str, str]]:
    found = []
    try:
        with open(f"{root}proc/self/cgroup") as file:
            lines = file.read().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found.append((path.rstrip("/"), "memory.max"))
        elif "memory" in controllers.split(","):
            found.append((f"/memory{path}".rstrip("/"), "memory.limit_in_bytes"))
    return found


_default: dict[str, PinnedPool] = {}


def default_pool() -> PinnedPool:
    """The pool of the module's functions, one a process."""
    return _default.get("pool") or _default.setdefault("pool", PinnedPool())


def pinned_empty(shape: Shape, dtype: DTypeLike = np.uint8) -> np.ndarray[Any, np.dtype[Any]]:
    """A new array in page-locked memory of the pool, of arbitrary contents.

    The memory goes back to the pool when the array and all its views are gone. It may take long when the pool has to
    grow; :func:`pinned_empty_async` does not hold the event loop meanwhile.

    Parameters
    ----------
    shape, dtype
        As of :func:`numpy.empty`.

    Raises
    ------
    MemoryError
        Where the pool's limit, the driver or the system does not allow more.
    """
    return default_pool().empty(shape, dtype)


async def pinned_empty_async(shape: Shape, dtype: DTypeLike = np.uint8) -> np.ndarray[Any, np.dtype[Any]]:
    """As :func:`pinned_empty`, without holding the event loop when the pool has to grow."""
    return await default_pool().empty_async(shape, dtype)
