"""The driver's ABI as ``driver_abi.h`` declares it, against the ``cuda.h`` of the oldest and the newest supported CUDA.

The headers come from PyPI's CUDA runtime packages, which the ``test`` dependency group asks for. Compiled, never run.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest

from aiocuda_copy import _driver

HERE = Path(__file__).parent
NATIVE = HERE.parents[1] / "_native"

HANDLES = {
    "Result": "CUresult",
    "Device": "CUdevice",
    "Context": "CUcontext",
    "Stream": "CUstream",
    "Event": "CUevent",
    "Module": "CUmodule",
    "Function": "CUfunction",
    "DevicePointer": "CUdeviceptr",
    "HostFunction": "CUhostFn",
}
OUR_HANDLES = {theirs: ours for ours, theirs in HANDLES.items()}


@dataclass(frozen=True)
class Cuda:
    """The headers of one CUDA version."""

    include: Path

    @property
    def cuda_h(self) -> str:
        return (self.include / "cuda.h").read_text()

    @property
    def typedefs(self) -> str:
        return (self.include / "cudaTypedefs.h").read_text()

    @property
    def version(self) -> int:
        found = re.search(r"#define CUDA_VERSION (\d+)", self.cuda_h)
        assert found
        return int(found[1])

    def versions(self, name: str) -> list[int]:
        """The API versions at which the signature of a name changed."""
        return sorted({int(v) for v in re.findall(rf"\(CUDAAPI \*PFN_{name}_v(\d+)\)", self.typedefs)})

    def chosen(self, name: str, asked: int) -> int | None:
        """The version that cuGetProcAddress gives for the one that is asked for.

        It refuses a version above the driver's own, rather than give the newest that it has.
        """
        if asked > self.version:
            return None
        return max((v for v in self.versions(name) if v <= asked), default=None)

    def symbol(self, name: str, version: int) -> str:
        """The exported symbol of a name's signature at a version."""
        rank = self.versions(name).index(version) + 1
        return name if rank == 1 else f"{name}_v{rank}"

    def mapped_symbol(self, name: str) -> str:
        """The symbol that cuda.h's own macros make of a name."""
        macro = re.search(rf"#define {name}\s+(?:__CUDA_API_PT[A-Z]+\()?(\w+)\)?\s*$", self.cuda_h, re.MULTILINE)
        return macro[1] if macro else name

    def parameters(self, name: str, version: int) -> list[str]:
        found = re.search(rf"PFN_{name}_v{version}\)\((.*?)\);", self.typedefs)
        assert found
        return [] if found[1] in ("", "void") else found[1].split(",")


def _cuda(package: str, major: str) -> Cuda:
    try:
        found = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed: pip install --group test")
    assert found.version.startswith(f"{major}.")
    header = next(path for path in found.files or () if path.name == "cuda.h")
    return Cuda(Path(str(found.locate_file(header))).parent)


@pytest.fixture(scope="module", params=["12.9", "13"])
def cuda(request: pytest.FixtureRequest) -> Cuda:
    if request.param == "12.9":
        return _cuda("nvidia-cuda-runtime-cu12", "12.9")
    return _cuda("nvidia-cuda-runtime", "13")


@dataclass(frozen=True)
class Prototype:
    bound_as: str
    member: str
    parameters: list[str]


def _declared(text: str) -> dict[str, Prototype]:
    table = text.split("#define AIOCUDA_ENTRY_POINTS(X)")[1].split("namespace")[0].replace("\\\n", " ")
    rows = re.findall(r"X\((\w+),\s*(\w+),\s*\((.*?)\)\)", table)
    return {
        bound_as: Prototype(bound_as, member, [part.strip() for part in parameters.split(",")] if parameters else [])
        for bound_as, member, parameters in rows
    }


DECLARED = _declared((NATIVE / "driver_abi.h").read_text())
ROWS = _driver._ENTRY_POINTS


def _compile(source: str, cuda: Cuda, tmp_path: Path, *, native: Path = NATIVE) -> subprocess.CompletedProcess[str]:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler (c++)")
    path = tmp_path / "check.cpp"
    path.write_text(source)
    command = [
        compiler,
        "-std=c++17",
        "-fsyntax-only",
        f"-I{native}",
        f"-I{HERE}",
        f"-isystem{cuda.include}",
        str(path),
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _prototype_checks(cuda: Cuda) -> str:
    lines = ["#include <cudaTypedefs.h>", '#include "driver_abi.h"', '#include "shapes.h"']
    for row in ROWS:
        version = cuda.chosen(row.name, row.version)
        if version is None:
            continue
        bound_as = row.bound_as or row.name
        member = DECLARED[bound_as].member
        lines.append(
            f"static_assert(shapes::same<decltype(aiocuda::abi::Driver::{member}), PFN_{row.name}_v{version}>(), "
            f'"{bound_as}");'
        )
    return "\n".join(lines) + "\n"


def _symbol_checks(cuda: Cuda) -> str:
    # In this mode cuda.h declares every symbol under its exported name, without its macros.
    lines = [
        "#define __CUDA_API_VERSION_INTERNAL",
        "#include <cuda.h>",
        '#include "driver_abi.h"',
        '#include "shapes.h"',
    ]
    for row in ROWS:
        version = cuda.chosen(row.name, row.version)
        if version is None:
            continue
        bound_as = row.bound_as or row.name
        member = DECLARED[bound_as].member
        symbol = cuda.symbol(row.name, version)
        lines.append(
            f"static_assert(shapes::same<decltype(aiocuda::abi::Driver::{member}), decltype(&{symbol})>(), "
            f'"{bound_as}: {symbol}");'
        )
    return "\n".join(lines) + "\n"


def test_every_entry_point_has_a_prototype_and_a_version() -> None:
    assert {row.bound_as or row.name for row in ROWS} == set(DECLARED)
    assert len(ROWS) == len(DECLARED)


def test_prototypes(cuda: Cuda, tmp_path: Path) -> None:
    done = _compile(_prototype_checks(cuda), cuda, tmp_path)
    assert done.returncode == 0, done.stderr


def test_versions_give_the_symbol_that_has_the_prototype(cuda: Cuda, tmp_path: Path) -> None:
    for row in ROWS:
        versions = cuda.versions(row.name)
        assert versions, f"cudaTypedefs.h does not know {row.name}"
        mapped = cuda.mapped_symbol(row.name)
        # A successor with more parameters (cuCtxGetDevice_v2) has no macro; its predecessor keeps the plain name.
        assert mapped in (row.name, cuda.symbol(row.name, versions[-1]))
    done = _compile(_symbol_checks(cuda), cuda, tmp_path)
    assert done.returncode == 0, done.stderr


def test_only_optional_entry_points_are_newer_than_the_header(cuda: Cuda) -> None:
    for row in ROWS:
        if row.required:
            assert cuda.chosen(row.name, row.version) is not None, row.name


def test_rows_of_one_name_are_different_signatures() -> None:
    newest = _cuda("nvidia-cuda-runtime", "13")
    assert newest.chosen("cuMemcpyBatchAsync", 12080) == 12080
    assert newest.chosen("cuMemcpyBatchAsync", 13000) == 13000
    oldest = _cuda("nvidia-cuda-runtime-cu12", "12.9")
    assert oldest.symbol("cuMemcpyBatchAsync", 12080) == "cuMemcpyBatchAsync"
    assert newest.symbol("cuMemcpyBatchAsync", 13000) == "cuMemcpyBatchAsync_v2"


def test_handles_stand_where_the_driver_has_them(cuda: Cuda) -> None:
    # Handles are all void* to the compiler: it would not see that two of them are swapped.
    for row in ROWS:
        version = cuda.chosen(row.name, row.version)
        if version is None:
            continue
        ours = DECLARED[row.bound_as or row.name].parameters
        theirs = cuda.parameters(row.name, version)
        assert len(ours) == len(theirs), row.name
        for our_type, their_parameter in zip(ours, theirs, strict=True):
            our_base = our_type.replace("const", "").strip(" *")
            their_base = re.sub(r"\bconst\b", "", their_parameter).replace("*", " ").split()[0]
            their_handle = OUR_HANDLES.get(re.sub(r"_v\d+$", "", their_base))
            if our_base in HANDLES or their_handle is not None:
                assert our_base == their_handle, f"{row.name}: {our_type} for {their_parameter.strip()}"


def test_constants_and_structs(cuda: Cuda, tmp_path: Path) -> None:
    done = _compile((HERE / "constants_and_structs.cpp").read_text(), cuda, tmp_path)
    assert done.returncode == 0, done.stderr


def test_every_constant_type_and_field_is_compared() -> None:
    header = re.sub(r"//.*", "", (NATIVE / "driver_abi.h").read_text())
    checks = (HERE / "constants_and_structs.cpp").read_text()
    constants = set(re.findall(r"\b(k[A-Z]\w*)\s*=", header))
    assert constants == set(re.findall(r"^SAME_VALUE\((\w+),", checks, re.MULTILINE))
    types = set(re.findall(r"^(?:using|enum|struct) (\w+)", header, re.MULTILINE)) - {"Driver"}
    assert types == set(re.findall(r"^SAME_TYPE\(abi::(\w+),", checks, re.MULTILINE))
    fields = set()
    for struct, body in re.findall(r"struct (\w+) \{\n(.*?)\n\};", header, re.DOTALL):
        if struct == "Driver":
            continue
        for declaration in body.split(";"):
            names = re.sub(r"^\s*(?:const\s+)?\w+\s*\**", "", declaration.strip())
            fields |= {(struct, name.strip()) for name in names.split(",") if name.strip()}
    assert fields == set(re.findall(r"^SAME_FIELD\((\w+), (\w+),", checks, re.MULTILINE))
    assert len(fields) > 20


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("(Stream, HostFunction, void*)", "(Stream, HostFunction)"),
        ("(Stream, HostFunction, void*)", "(Stream, void*, HostFunction, int)"),
        ("(DevicePointer, DevicePointer, size_t, Stream)", "(DevicePointer, DevicePointer, int, Stream)"),
        ("(DevicePointer, DevicePointer, size_t, Stream)", "(DevicePointer, void*, size_t, Stream)"),
        ("(Stream, DevicePointer, uint32_t, unsigned)", "(Stream, DevicePointer, uint64_t, unsigned)"),
        ("(unsigned, int*, void**, DevicePointer)", "(unsigned, short*, void**, DevicePointer)"),
        ("using HostFunction = void (*)(void*);", "using HostFunction = void (*)(int);"),
        ("  unsigned flags;\n", ""),
    ],
)
def test_a_wrong_prototype_fails(right: str, wrong: str, cuda: Cuda, tmp_path: Path) -> None:
    text = (NATIVE / "driver_abi.h").read_text()
    assert right in text
    (tmp_path / "driver_abi.h").write_text(text.replace(right, wrong))
    done = _compile(_prototype_checks(cuda), cuda, tmp_path, native=tmp_path)
    assert done.returncode != 0
    assert "static assertion failed" in done.stderr or "static_assert" in done.stderr


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("kErrorNotReady = 600", "kErrorNotReady = 601"),
        ("kCaptureRelaxed = 2", "kCaptureRelaxed = 1"),
        ("  size_t src_pitch, src_height;", "  size_t src_height, src_pitch;"),
        ("  MemoryLocation source_hint;\n  MemoryLocation destination_hint;\n  unsigned flags;\n",
         "  unsigned flags;\n  MemoryLocation source_hint;\n  MemoryLocation destination_hint;\n"),
    ],
)  # fmt: skip
def test_a_wrong_constant_or_field_fails(right: str, wrong: str, cuda: Cuda, tmp_path: Path) -> None:
    text = (NATIVE / "driver_abi.h").read_text()
    assert right in text
    (tmp_path / "driver_abi.h").write_text(text.replace(right, wrong))
    done = _compile((HERE / "constants_and_structs.cpp").read_text(), cuda, tmp_path, native=tmp_path)
    assert done.returncode != 0
    assert "static assertion failed" in done.stderr or "static_assert" in done.stderr
