"""The checks as tests: all of them on a real GPU, a quick form of them on the emulated one."""

from __future__ import annotations

from typing import Any

import pytest

from aiocuda_copy.testing import emulated

from .expected import EXPECTED
from .runner import CHECKS, differences, observe


@pytest.fixture(scope="module")
def seen(request: pytest.FixtureRequest) -> dict[str, Any]:
    chosen = [
        item.callspec.params["name"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == test_conformance.__name__
    ]
    return dict(observe(chosen, "emulated" if emulated() else "real", quick=emulated()))


@pytest.mark.parametrize("name", CHECKS)
def test_conformance(name: str, seen: dict[str, Any]) -> None:
    assert not differences(seen[name], EXPECTED[name], quick=emulated())


def test_every_check_has_an_expectation() -> None:
    assert EXPECTED.keys() == CHECKS.keys()
