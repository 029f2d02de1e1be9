"""How the emulated driver gets into a process, and out of it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from aiocuda_copy.testing import _probe

PRELUDE = "from aiocuda_copy import testing\nfrom cuda.bindings import driver\n"


def run(code: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", PRELUDE + code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **environment},
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout.strip()


def test_the_environment_chooses():
    code = "testing.driver_from_environment(); print(testing.emulated())"
    assert run(code, AIOCUDA_COPY_DRIVER="emulated") == "True"
    assert run(code, AIOCUDA_COPY_DRIVER="real") == "False"
    assert run(code, AIOCUDA_COPY_DRIVER="") == "False"
    assert run(code, AIOCUDA_COPY_DRIVER="auto") == str(not _probe.real_device_exists())
    with pytest.raises(AssertionError, match="must be one of auto, real, emulated, not 'imaginary'"):
        run(code, AIOCUDA_COPY_DRIVER="imaginary")


def test_whoever_makes_the_first_call():
    """cuda.bindings and cuda.core look for the driver by themselves."""
    code = "print(driver.cuInit(0), testing.emulated())"
    assert run(code, AIOCUDA_COPY_DRIVER="emulated") == "(<CUresult.CUDA_SUCCESS: 0>,) False"
    code = "from cuda.core import Device; print(Device().name)"
    assert run(code, AIOCUDA_COPY_DRIVER="emulated") == "Emulated GPU 0"


@pytest.mark.parametrize("exists", [False, True])
def test_auto_takes_the_real_driver_where_it_finds_a_device(monkeypatch: pytest.MonkeyPatch, exists: bool) -> None:
    monkeypatch.setenv("AIOCUDA_COPY_DRIVER", "auto")
    monkeypatch.setattr(_probe, "real_device_exists", lambda: exists)
    assert _probe.from_environment() == ("real" if exists else "emulated")


def test_importing_does_nothing():
    assert run(
        "import threading; print(testing.emulated(), len(open('/proc/self/maps').read().split('libaiocuda')))"
    ) == ("False 1")


def test_a_real_driver_is_in_the_way(tmp_path):
    library = tmp_path / "libcuda.so.1"
    subprocess.run(
        ["cc", "-shared", "-x", "c", "/dev/null", "-Wl,-soname,libcuda.so.1", "-o", library], check=True, timeout=60
    )
    code = (
        f"import ctypes; ctypes.CDLL({str(library)!r})\n"
        "try: testing.use_emulated_driver()\n"
        "except RuntimeError as error: print(error)\n"
    )
    assert "the real CUDA driver is already loaded" in run(code)


def test_configuration():
    code = (
        "testing.use_emulated_driver(devices=3, driver_version=12090, device_nbytes=1 << 30)\n"
        "driver.cuInit(0)\n"
        "print(driver.cuDeviceGetCount()[1], driver.cuDriverGetVersion()[1], driver.cuDeviceTotalMem(2)[1])"
    )
    assert run(code) == f"3 12090 {1 << 30}"


def test_entry_points_by_version_and_flags():
    code = """
testing.use_emulated_driver(driver_version=13000)
driver.cuInit(0)
def find(name, version, flags=0):
    code, address, status = driver.cuGetProcAddress(name, version, flags)
    return int(code), int(address or 0), None if status is None else int(status)
batch = [find(b"cuMemcpyBatchAsync", version) for version in (12070, 12080, 12090, 13000, 13010)]
assert batch[0][1:] == (0, 2)
assert batch[1] == batch[2] != batch[3]
assert batch[1][1] and batch[3][1]
assert batch[4][0] == 1
assert find(b"cuTexRefCreate", 13000) == (0, 0, 1)
assert find(b"cuStreamQuery", 13000)[1] != find(b"cuStreamQuery", 13000, 2)[1]
assert find(b"cuMemAlloc", 13000) == find(b"cuMemAlloc", 13000, 2)
assert len({find(b"cuCtxCreate", version)[1] for version in (3020, 11040, 12050)}) == 3
"""
    run(code)


def test_per_thread_variants_use_the_per_thread_stream():
    code = """
import ctypes
emulator = testing.use_emulated_driver()
driver.cuInit(0)
driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(0)[1])
function = driver.cuGetProcAddress(b"cuMemsetD8Async", 13000, 2)[1]
arguments = ctypes.c_uint64, ctypes.c_ubyte, ctypes.c_size_t, ctypes.c_void_p
memset = ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(int(function))
emulator.hold()
address = int(driver.cuMemAlloc(64)[1])
assert memset(address, 1, 64, None) == 0
print(emulator.pending(1), emulator.pending(2))
"""
    assert run(code) == "[] ['memset']"


def test_after_fork_every_call_fails_and_nothing_hangs():
    code = """
import os, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # about forking a process with threads, which is the point
emulator = testing.use_emulated_driver()
array = testing.DeviceArray(64)
pid = os.fork()
if pid == 0:
    os._exit(int(driver.cuMemAlloc(64)[0]) * 10 + int(driver.cuInit(0)[0]))
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    assert run(code) == "33"


@pytest.mark.parametrize("held", [False, True])
def test_leaving_with_work_queued_is_quiet(held):
    code = f"""
emulator = testing.use_emulated_driver()
driver.cuInit(0)
driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(0)[1])
stream = driver.cuStreamCreate(1)[1]
if {held}: emulator.hold()
for _ in range(100): emulator.kernel(stream, 1000)
"""
    assert run(code) == ""


def test_unknown_functions_fail_when_called():
    code = """
testing.use_emulated_driver()
driver.cuInit(0)
try: driver.cuTexRefCreate()
except RuntimeError as error: print("not found" in str(error))
"""
    assert run(code) == "True"


def test_device_arrays():
    code = """
import gc, numpy as np
emulator = testing.use_emulated_driver()
values = np.arange(24, dtype=np.float32).reshape(4, 6)
array = testing.DeviceArray.from_numpy(values, device=1, stream=2)
interface = array.__cuda_array_interface__
assert interface.pop("data") == (array.ptr, False)
assert interface == {"version": 3, "shape": (4, 6), "typestr": "<f4", "strides": None, "stream": 2}
assert array.device == 1 and array.nbytes == 96 and len(array) == 4
assert np.array_equal(array.T[1:, ::2].to_numpy(), values.T[1:, ::2])
assert array[::2].__cuda_array_interface__["strides"] == (48, 4)
assert array[1, 2].to_numpy() == 8.0
view = array[1]
del array
assert np.array_equal(view.to_numpy(), values[1])
assert emulator.live()["device_allocations"] == 1
del view
gc.collect()
assert emulator.live()["device_allocations"] == 0 and emulator.live()["contexts"] == 0
with testing.DeviceArray(0) as empty:
    assert empty.to_numpy().shape == (0,)
"""
    run(code)
