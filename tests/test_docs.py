"""The code in the documentation works: every page's Python blocks run in order, on the emulated driver or on a GPU."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from aiocuda_copy import Copier, CopierStats, testing
from aiocuda_copy.testing import Emulator, emulated

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]

# A block is ``python``; one that only shows signatures is ``python no-run``; one that begins with a comment with the
# name of a test file is a test. One that is ``python gpu torch`` needs a GPU and that package, and none before it.
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
GPU_BLOCK = re.compile(r"^```python gpu (\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# A page may say what its blocks need beside the package: <!-- needs: starlette, httpx -->
NEEDS = re.compile(r"^<!-- needs: (.*) -->$", re.MULTILINE)
TEST_FILE = re.compile(r"# (test_\w+\.py)\n")

# Runs blocks in one namespace, those that await at the top level as an asyncio prompt would.
RUNNER = """
import ast, asyncio, inspect, pathlib, sys
namespace = {"__name__": "__main__"}
with asyncio.Runner() as runner:
    for path in sys.argv[1:]:
        code = compile(pathlib.Path(path).read_text(), path, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        result = eval(code, namespace)
        if inspect.iscoroutine(result):
            runner.run(result)
"""


def blocks(page: Path) -> list[str]:
    return BLOCK.findall(page.read_text())


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_code_runs(page: Path, tmp_path: Path) -> None:
    needs = [package for line in NEEDS.findall(page.read_text()) for package in line.split(", ")]
    for package in needs:
        pytest.importorskip(package)
    scripts, tests = [], []
    for number, block in enumerate(blocks(page)):
        test = TEST_FILE.match(block)
        path = tmp_path / (test.group(1) if test else f"block_{number}.py")
        path.write_text(block)
        (tests if test else scripts).append(str(path))
    # Some pages show how the examples are used.
    modules = os.pathsep.join([str(ROOT / "examples"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": modules}
    # Importing torch as it is on a machine with a GPU loads the real driver, and a process has one.
    if emulated() or "torch" not in needs:
        environment["AIOCUDA_COPY_DRIVER"] = "emulated"
    if scripts:
        command = [sys.executable, "-X", "dev", "-W", "error", "-c", RUNNER, *scripts]
        subprocess.run(command, check=True, env=environment, cwd=tmp_path, timeout=60)
    if tests:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:asyncio", *tests]
        subprocess.run(command, check=True, env=environment, cwd=tmp_path, timeout=60)


@pytest.mark.real_gpu
@pytest.mark.parametrize(
    ("package", "block"),
    [
        pytest.param(*found.groups(), id=f"{page.name}, {found.group(1)}")
        for page in PAGES
        for found in GPU_BLOCK.finditer(page.read_text())
    ],
)
def test_code_runs_on_a_gpu(package: str, block: str, tmp_path: Path) -> None:
    pytest.importorskip(package)
    path = tmp_path / "block.py"
    path.write_text(block)
    subprocess.run([sys.executable, "-c", RUNNER, str(path)], check=True, cwd=tmp_path, timeout=100)


def test_blocks_are_run_or_only_show_signatures() -> None:
    for page in PAGES:
        for kind in re.findall(r"^```python *(.*)$", page.read_text(), re.MULTILINE):
            # What needs Ray is run by test_ray_example.py.
            assert re.fullmatch(r"|gpu (torch|cupy|jax|numba)|no-run|ray", kind), f"{page.name}: {kind}"
            assert kind != "no-run" or "reference" in page.parts, page.name


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("copier", [field.name for field in fields(CopierStats)]),
        ("copier", list(inspect.signature(Copier).parameters)),
        ("testing", [name for name in dir(Emulator) if not name.startswith("_")]),
        ("testing", [name for name in dir(testing.DeviceArray) if not name.startswith("_")]),
        ("testing", ["use_emulated_driver", "driver_from_environment", "emulated", "current_emulator", "Call", "Wait"]),
    ],
)
def test_reference_is_complete(page: str, names: list[str]) -> None:
    text = (ROOT / "docs" / "reference" / f"{page}.md").read_text()
    assert [name for name in names if not re.search(rf"`(DeviceArray\.)?{name}\b", text)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", page.read_text()):
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
