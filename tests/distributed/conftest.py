"""Shared by the tests with two processes."""

from collections.abc import Iterator

import pytest
from processes import Processes


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    both = Processes(2)
    yield both
    both.stop()
