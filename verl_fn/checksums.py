"""Checksums of large files, whose blocks several threads read."""

from __future__ import annotations

import functools
import operator
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

BLOCK, THREADS = 4 * 2**20, 4  # bytes that a thread reads at a time; threads


def crc_of(path: Path) -> int:
    """Returns the CRC-32 of a file.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp(), "a")
        >>> file.write_bytes(b"123456789")
        9
        >>> hex(crc_of(file))
        '0xcbf43926'
    """

    def of_block(start: int) -> int:
        with path.open("rb") as file:
            file.seek(start)
            return zlib.crc32(file.read(BLOCK))

    with path.open("rb") as file, ThreadPoolExecutor(THREADS) as pool:
        whole = os.fstat(file.fileno()).st_size // BLOCK * BLOCK
        crc = functools.reduce(_joined, pool.map(of_block, range(0, whole, BLOCK)), 0)
        file.seek(whole)
        return zlib.crc32(file.read(), crc)


def _joined(before: int, block: int) -> int:
    """Returns the CRC-32 of some bytes and a block after them, from the CRC-32 of each.

    Example:
        >>> some, block = b"some", b"block" + bytes(BLOCK - 5)
        >>> _joined(zlib.crc32(some), zlib.crc32(block)) == zlib.crc32(some + block)
        True
    """
    return functools.reduce(operator.xor, (each for bit, each in enumerate(_shifted()) if before >> bit & 1), block)


@functools.cache
def _shifted() -> list[int]:
    """Returns what becomes of each bit of a CRC-32 when any block follows: a CRC is linear over bits."""
    zeros = bytes(BLOCK)
    none = zlib.crc32(zeros)
    return [zlib.crc32(zeros, 1 << bit) ^ none for bit in range(32)]
