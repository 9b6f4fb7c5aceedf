"""What the tests with real ranks share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.ranks import Stem


@pytest.fixture(scope="session")
def stem() -> Iterator[Stem]:
    """A warm process to fork ranks from."""
    stem = Stem(["tests.integration.fits", "s3fs"])  # Lightning imports s3fs, if it is there, to look at any path
    yield stem
    stem.close()
