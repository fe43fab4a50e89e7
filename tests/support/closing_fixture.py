"""Fixtures that close their object."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest


def closing_fixture(make: Callable[[], Any]) -> Any:
    """Returns a fixture of one object for all tests of a module; it is closed after them."""

    @pytest.fixture(scope="module")
    def made() -> Iterator[Any]:
        with closing(make()) as each:
            yield each

    return made
