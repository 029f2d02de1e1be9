"""The pytest plugin: which driver a test run uses, and the emulated GPU as a fixture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from aiocuda_copy.testing import Emulator

_DRIVER = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("aiocuda_copy")
    group.addoption(
        "--driver",
        choices=("emulated", "real", "auto"),
        default=None,
        help="the CUDA driver that tests use: the emulated one, the real one, or the real one if it finds a device",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "real_gpu: needs a real GPU; skipped on the emulated driver")
    config.addinivalue_line("markers", "emulated_only: needs the emulated driver; skipped on a real GPU")
    choice = config.getoption("--driver")
    if choice is None:
        return
    from aiocuda_copy.testing._probe import resolve

    choice = resolve(choice)
    if choice == "emulated":
        from aiocuda_copy.testing import use_emulated_driver

        use_emulated_driver()
    else:
        from aiocuda_copy.testing._library import refuse_real_driver

        try:
            refuse_real_driver()
        except ValueError as exc:
            raise pytest.UsageError(str(exc)) from None
    config.stash[_DRIVER] = choice


def pytest_report_header(config: pytest.Config) -> str | None:
    choice = config.stash.get(_DRIVER, None)
    return None if choice is None else f"CUDA driver: {choice}"


def pytest_runtest_setup(item: pytest.Item) -> None:
    choice = item.config.stash.get(_DRIVER, None)
    if item.get_closest_marker("real_gpu") is not None and choice != "real":
        pytest.skip("needs a real GPU (--driver=real)")
    if item.get_closest_marker("emulated_only") is not None and choice == "real":
        pytest.skip("needs the emulated driver (--driver=emulated)")


@pytest.fixture
def emulated_gpu(request: pytest.FixtureRequest) -> Iterator[Emulator]:
    """The emulated GPU's controls, reset before the test and after it."""
    from aiocuda_copy.testing import use_emulated_driver

    if request.config.stash.get(_DRIVER, None) == "real":
        pytest.skip("needs the emulated driver (--driver=emulated)")
    emulator = use_emulated_driver()
    emulator.reset()
    try:
        yield emulator
    finally:
        emulator.reset()
