"""Objects of every kind, dropped by all but the library while their copy is in flight, and their memory wanted again.

The kinds are those of the table in docs/howto/use-your-framework.md. Of some the emulated driver has stand-ins; all run
on a GPU.
"""

from __future__ import annotations

import gc
import importlib
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from calls import (
    BULK,
    SMALL,
    Stream,
    calls,
    content,
    copies_enqueued,
    nothing_held,
    on_device,
    pinned_array,
    turns,
    until,
)
from conformance.gpu import LEGACY, Gpu
from cuda.bindings import driver
from dlpack_producer import UINT, Producer
from kinds import bytes_at, check, context_of, host_view, one_loop, put
from tensors import import_jax

from aiocuda_copy import copy_to_device, copy_to_host
from aiocuda_copy.testing import DeviceArray, Emulator, emulated

pytestmark = [
    one_loop,
    pytest.mark.parametrize("nbytes", [SMALL, BULK]),
    # Those of the frameworks, of one another and of the machine.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

# A kernel's on a GPU, long enough for what a test does behind it.
MILLISECONDS = 200
OLD, NEW, OTHER = 0, 5, 9
N_OTHERS = 6


class Kind:
    """Makes objects of a kind whose bytes all have one value, and says where they are."""

    on_device = True
    writable = True
    # Its own, in which it allocates.
    streams: tuple[Any, ...] = ()

    def make(self, nbytes: int, value: int) -> Any:
        """The bytes are there when it returns, whichever stream looks."""
        raise NotImplementedError

    def address(self, obj: Any) -> int:
        return int(obj.__cuda_array_interface__["data"][0])

    def content(self, obj: Any, nbytes: int) -> Any:
        address = self.address(obj)
        return bytes_at(address, nbytes) if self.on_device else host_view(address, nbytes)


def settled(obj: Any) -> Any:
    """What a framework has filled in the legacy stream, for which other streams do not wait."""
    with context_of(0):
        check(driver.cuStreamSynchronize(driver.CU_STREAM_LEGACY))
    return obj


# On the device.


class Speaking:
    """Tells of its memory by ``__cuda_array_interface__`` and by nothing else, as RMM (version 0) and Numba do."""

    def __init__(self, base: DeviceArray, version: int) -> None:
        self.base = base
        interface = {"data": (base.ptr, False), "shape": (base.nbytes,), "strides": None, "typestr": "|u1"}
        self.__cuda_array_interface__ = interface | ({"version": 3, "stream": None} if version == 3 else {"version": 0})


class AnyInterface(Kind):
    def __init__(self, version: int) -> None:
        self.version = version

    def make(self, nbytes: int, value: int) -> Any:
        return Speaking(on_device(nbytes, value), self.version)


class AnyDlpack(Kind):
    def make(self, nbytes: int, value: int) -> Any:
        return Producer(on_device(nbytes, value), (nbytes,), UINT, 8)

    def address(self, obj: Any) -> int:
        return int(obj.base.ptr)


class CoreBuffer(Kind):
    """Freed and allocated in the order of one idle stream, so that the pool may hand the same memory out at once."""

    def __init__(self) -> None:
        from cuda.core import Device, DeviceMemoryResource

        device = Device(0)
        device.set_current()
        self.stream, self.resource = device.create_stream(), DeviceMemoryResource(device)
        self.streams = (self.stream,)

    def make(self, nbytes: int, value: int) -> Any:
        buffer = self.resource.allocate(nbytes, stream=self.stream)
        self.stream.sync()
        put(int(buffer.handle), np.full(nbytes, value, np.uint8))
        return buffer

    def address(self, obj: Any) -> int:
        return int(obj.handle)


class TorchCuda(Kind):
    def __init__(self) -> None:
        self.torch = pytest.importorskip("torch")
        if not self.torch.cuda.is_available():
            pytest.skip("this torch sees no GPU")

    def make(self, nbytes: int, value: int) -> Any:
        return settled(self.torch.full((nbytes,), value, dtype=self.torch.uint8, device="cuda"))

    def address(self, obj: Any) -> int:
        return int(obj.data_ptr())


class Cupy(Kind):
    def __init__(self) -> None:
        self.cupy = pytest.importorskip("cupy")
        if not self.cupy.cuda.is_available():
            pytest.skip("this CuPy sees no GPU")

    def make(self, nbytes: int, value: int) -> Any:
        return settled(self.cupy.full(nbytes, value, dtype=np.uint8))


class Jax(Kind):
    writable = False

    def __init__(self, platform: str) -> None:
        self.jax = import_jax()
        if platform == "gpu" and self.jax.default_backend() != "gpu":
            pytest.skip("this JAX sees no GPU")
        self.on_device, self.device = platform == "gpu", self.jax.devices(platform)[0]

    def make(self, nbytes: int, value: int) -> Any:
        with self.jax.default_device(self.device):
            return self.jax.numpy.full(nbytes, value, "uint8").block_until_ready()

    def address(self, obj: Any) -> int:
        return int(obj.unsafe_buffer_pointer())


class Numba(Kind):
    def __init__(self) -> None:
        self.cuda = pytest.importorskip("numba.cuda")
        if not self.cuda.is_available():
            pytest.skip("this Numba sees no GPU")

    def make(self, nbytes: int, value: int) -> Any:
        # It frees late, several at a time.
        pending = getattr(self.cuda.current_context().memory_manager, "deallocations", None)
        if pending is not None:
            pending.clear()
        return settled(self.cuda.to_device(np.full(nbytes, value, np.uint8)))


class Rmm(Kind):
    def __init__(self) -> None:
        pytest.importorskip("rmm")
        self.rmm = importlib.import_module("rmm")

    def make(self, nbytes: int, value: int) -> Any:
        return settled(self.rmm.DeviceBuffer.to_device(bytes([value]) * nbytes))


# On the host.


class HostBuffer(Kind):
    """What has the buffer protocol."""

    on_device = False

    def __init__(self, make: Callable[[int, int], Any]) -> None:
        self._make = make

    def make(self, nbytes: int, value: int) -> Any:
        return self._make(nbytes, value)

    def address(self, obj: Any) -> int:
        return int(np.frombuffer(obj, np.uint8).ctypes.data)


def mapped(nbytes: int, value: int) -> mmap.mmap:
    mapping = mmap.mmap(-1, nbytes)
    mapping[:] = bytes([value]) * nbytes
    return mapping


class TorchCpu(Kind):
    on_device = False

    def __init__(self) -> None:
        self.torch = pytest.importorskip("torch")

    def make(self, nbytes: int, value: int) -> Any:
        return self.torch.full((nbytes,), value, dtype=self.torch.uint8)

    def address(self, obj: Any) -> int:
        return int(obj.data_ptr())


class TorchPinned(TorchCpu):
    """torch keeps what is freed, and gives it to the next tensor of about that size."""

    def __init__(self) -> None:
        super().__init__()
        if not self.torch.cuda.is_available():
            pytest.skip("this torch sees no GPU")

    def make(self, nbytes: int, value: int) -> Any:
        return super().make(nbytes, value).pin_memory()


ANYWHERE: dict[str, Callable[[], Kind]] = {
    "like Numba": lambda: AnyInterface(3),
    "like RMM": lambda: AnyInterface(0),
    "DLPack": AnyDlpack,
    "cuda.core": CoreBuffer,
    "numpy": lambda: HostBuffer(lambda nbytes, value: np.full(nbytes, value, np.uint8)),
    "pinned_empty": lambda: HostBuffer(pinned_array),
    "bytearray": lambda: HostBuffer(lambda nbytes, value: bytearray([value]) * nbytes),
    "memoryview": lambda: HostBuffer(lambda nbytes, value: memoryview(bytearray([value]) * (nbytes + 5))[5:]),
    "mmap": lambda: HostBuffer(mapped),
    "torch on the host": TorchCpu,
    "JAX on the host": lambda: Jax("cpu"),
}
ON_A_GPU: dict[str, Callable[[], Kind]] = {
    "torch": TorchCuda,
    "torch, pinned": TorchPinned,
    "CuPy": Cupy,
    "JAX": lambda: Jax("gpu"),
    "Numba": Numba,
    "RMM": Rmm,
}
KINDS = [pytest.param(make, id=name) for name, make in ANYWHERE.items()]
KINDS += [pytest.param(make, id=name, marks=pytest.mark.real_gpu) for name, make in ON_A_GPU.items()]


# Of the whole module, so that what a framework opens or compiles when it is first used is no test's.
@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    made: Kind = request.param()
    for nbytes in (SMALL, BULK):
        assert (made.content(one := made.make(nbytes, 1), nbytes) == 1).all(), one
    return made


@pytest.fixture(scope="module")
def kernels() -> Gpu | None:
    return None if emulated() else Gpu()


class Held:
    """Copies that are begun and do not end: on a GPU for a while, behind a kernel, and else until they are released.

    Behind a kernel the library waits with its copies; on the emulated driver they are enqueued, and held themselves.
    """

    def __init__(self, gpu: Emulator | None, kernels: Gpu | None) -> None:
        self._gpu, self._kernels, self.stream = gpu, kernels, Stream()

    def hold(self) -> int:
        if self._gpu is not None:
            self._gpu.hold()
        elif self._kernels is not None:
            self._kernels.kernel(self.stream.handle, MILLISECONDS)
        return self.stream.handle

    async def begun(self, kind: Kind) -> None:
        await turns()
        gpu = self._gpu
        if gpu is not None:
            await until(lambda: copies_enqueued(gpu) > 0)
            # What is allocated next is filled meanwhile.
            for stream in (LEGACY, *kind.streams):
                gpu.release(stream)

    def release(self) -> None:
        if self._gpu is not None:
            self._gpu.release()


@pytest.fixture
def held(gpu: Emulator | None, kernels: Gpu | None) -> Held:
    return Held(gpu, kernels)


@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.parametrize("dropped", ["source", "destination"])
async def test_memory_is_not_handed_out_before_its_copy_has_ended(
    kind: Kind, held: Held, nbytes: int, dropped: str, cancelled: bool
) -> None:
    is_source = dropped == "source"
    if not (is_source or kind.writable):
        pytest.skip("immutable, and so no destination")
    mine, value = kind.make(nbytes, NEW if is_source else OLD), OLD if is_source else NEW
    address = kind.address(mine)
    opposite: Any = np.full(nbytes, value, np.uint8) if kind.on_device else on_device(nbytes, value)
    copy = copy_to_host if kind.on_device is is_source else copy_to_device
    stream = held.hold()
    async with calls() as start:
        call = start(copy(mine, opposite, stream=stream) if is_source else copy(opposite, mine, stream=stream))
        await held.begun(kind)
        assert not call.ended
        if cancelled:  # a small one's call ends here, and then nobody holds what it copies but the library
            call.cancel()
            await turns()
        del mine
        gc.collect()
        others = [kind.make(nbytes, OTHER) for _ in range(N_OTHERS)]
        assert cancelled or address not in [kind.address(other) for other in others]
        held.release()
        await call.end()
        result = None if cancelled else await call.result()
    await nothing_held()
    if is_source:
        # What is cancelled may have been copied, or a part of it.
        assert np.isin(content(opposite), [OLD, NEW] if cancelled else [NEW]).all()
    elif not cancelled:
        assert (kind.content(result, nbytes) == NEW).all()
    assert all((kind.content(other, nbytes) == OTHER).all() for other in others)
