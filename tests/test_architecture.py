"""The rules that keep the package's parts apart, and what importing it must not do."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import aiocuda_copy
from aiocuda_copy import _driver

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "aiocuda_copy"
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}

# Driver calls outside of the library; these modules are imported when they are used.
BARE_CALLS = {"aiocuda_copy.cli._raw", "aiocuda_copy.testing._device_array"}


def imports(module: str, *, at_import: bool = False) -> Iterator[str]:
    """The full names of the modules that a module imports; ``at_import`` leaves out what its functions import."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]

    def walk(node: ast.AST) -> Iterator[ast.AST]:
        for child in ast.iter_child_nodes(node):
            if at_import and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            yield child
            yield from walk(child)

    for node in walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                parents = parents[: len(parents) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            yield base
            yield from (f"{base}.{name.name}" for name in node.names)


def importers(target: str) -> set[str]:
    return {
        module for module in MODULES if any(name == target or name.startswith(f"{target}.") for name in imports(module))
    }


def test_plan_and_ticket_know_neither_driver_nor_loop() -> None:
    for name in imports("aiocuda_copy._plan"):
        assert not re.match(r"aiocuda_copy\._native\b|asyncio\b|anyio\b|cuda\b", name), name
    # It is compiled into one module with what does know them, by these names.
    code = re.sub(r"#.*", "", (ROOT / "_native" / "ticket.pxi").read_text())
    assert "cdef class Ticket" in code
    assert not re.search(r"\b(abi|core|host)\.|\bc?import\b|asyncio|anyio|trio|future", code)


def test_only_driver_imports_the_bindings() -> None:
    """Of the library itself. The tools for tests and the benchmark's bare calls stand outside of it."""
    assert importers("cuda.bindings") - BARE_CALLS <= {"aiocuda_copy._driver"}


def test_only_the_dispatcher_touches_the_loop() -> None:
    library = {module for module in MODULES if not re.match(r"aiocuda_copy\.(cli|testing|__main__)", module)}
    assert (importers("asyncio") | importers("selectors")) & library <= {"aiocuda_copy._dispatcher"}


def test_copies_is_the_top() -> None:
    allowed = {"aiocuda_copy", "aiocuda_copy._prefetch"}
    found = {module for module in importers("aiocuda_copy._copies") if not module.startswith("aiocuda_copy.cli")}
    assert found <= allowed


def test_the_package_imports_no_framework_and_no_driver_at_import() -> None:
    for module in MODULES.keys() - BARE_CALLS:
        for name in imports(module, at_import=True):
            assert not re.match(r"(cuda|torch|cupy|jax|numba|uvloop|trio)\b", name), (module, name)


def test_files_stay_readable() -> None:
    suffixes = {".py", ".pyx", ".pxd", ".pyi", ".h", ".cpp", ".cu", ".c"}
    folders = [PACKAGE, ROOT / "_native", ROOT / "tests", ROOT / "examples"]
    for path in (path for folder in folders for path in folder.rglob("*") if path.suffix in suffixes):
        assert len(path.read_text().splitlines()) <= 600, path.relative_to(ROOT)


IMPORT_PROBE = """
import os, sys, threading

def fds():
    names = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return {name: os.readlink(name) for name in names if os.path.lexists(name)}

def threads():
    return len(os.listdir("/proc/self/task"))

# NumPy is a dependency with threads of its own (its BLAS), and not what is being judged.
import numpy
before = fds(), threads()
import aiocuda_copy
import aiocuda_copy.testing
assert (fds(), threads()) == before, (before, fds(), threads())
assert threading.active_count() == 1
frameworks = {"cuda", "torch", "cupy", "jax", "numba", "uvloop", "trio", "pytest"}
loaded = frameworks & {name.partition(".")[0] for name in sys.modules}
assert not loaded, loaded
"""


def test_what_waits_is_not_even_bound() -> None:
    """pytorch/FBGEMM#5462, pytorch/pytorch#119393: a callback under the driver's lock, a destruction that waits."""
    bound = {row.name for row in _driver._ENTRY_POINTS}
    waits = {
        "cuStreamSynchronize",
        "cuEventSynchronize",
        "cuCtxSynchronize",
        "cuMemcpy",
        "cuMemcpyDtoH",
        "cuMemcpyHtoD",
    }
    stalls_others = {"cuStreamAddCallback", "cuMemHostAlloc", "cuMemFreeHost", "cuMemAlloc", "cuMemFree"}
    assert not bound & (waits | stalls_others)
    # Both return at once, whatever is behind them (conformance: waits_for_a_running_kernel).
    assert {name for name in bound if name.endswith("Destroy")} == {"cuEventDestroy", "cuStreamDestroy"}


def test_importing_has_no_side_effects() -> None:
    environment = {**os.environ, "AIOCUDA_COPY_DRIVER": "emulated"}
    subprocess.run([sys.executable, "-c", IMPORT_PROBE], check=True, env=environment, cwd="/")


def test_one_version() -> None:
    changelog = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert changelog[0] == aiocuda_copy.__version__ == version("aiocuda-copy")
