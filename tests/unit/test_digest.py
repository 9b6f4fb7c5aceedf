"""A file's digest block by block: any way of cutting the bytes gives the same, and a part can be verified alone."""

from __future__ import annotations

import os

import pytest
import xxhash

from lightning_resilience.checkpoint.digest import BLOCK, BlockDigest, pieces


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 5])
@pytest.mark.parametrize("step", [BLOCK // 3, BLOCK, 3 * BLOCK])
def test_each_block_has_its_digest_however_the_bytes_come(size: int, step: int) -> None:
    data = memoryview(os.urandom(size))
    digest = BlockDigest()
    for start in range(0, size, step):
        digest.update(data[start : start + step])
    found = pieces(size, digest.hexdigest())
    assert [stop for _, stop, _ in found] == [start for start, _, _ in found[1:]] + [size]
    for start, stop, piece in found:
        assert piece == xxhash.xxh3_64_hexdigest(data[start:stop])


def test_one_digest_of_a_large_file_covers_all_of_it() -> None:
    assert pieces(5 * BLOCK, "0" * 16) == [(0, 5 * BLOCK, "0" * 16)]


@pytest.mark.parametrize(
    ("size", "digest"), [(1, ""), (1, "0" * 15), (1, "0" * 32), (3 * BLOCK, "0" * 32), (1, "g" * 16)]
)
def test_what_cannot_be_a_digest_is_refused(size: int, digest: str) -> None:
    with pytest.raises(ValueError, match="is no digest"):
        pieces(size, digest)
