"""The partitions of many keys at once, the same as `bus.partitioner` gives one by one.

murmur2 in plain Python is a sixth of what sending a record costs; here each of its steps is taken for all keys of the
same length together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_SEED, _M = np.uint32(0x9747B28C), np.uint32(0x5BD1E995)


def partitions_of(keys: Sequence[bytes], partitions: int) -> list[int]:
    """The partition, of `partitions`, of each key."""
    found = np.empty(len(keys), dtype=np.int64)
    by_length: dict[int, list[int]] = {}
    for index, key in enumerate(keys):
        by_length.setdefault(len(key), []).append(index)
    for length, indexes in by_length.items():
        hashes = _murmur2(b"".join([keys[index] for index in indexes]), len(indexes), length)
        found[indexes] = (hashes & np.uint32(0x7FFFFFFF)) % np.uint32(partitions)
    return [int(partition) for partition in found]


def _murmur2(joined: bytes, count: int, length: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """The hashes of `count` keys of `length` bytes that lie one after the other."""
    data = np.frombuffer(joined, dtype=np.uint8).reshape(count, length)
    whole = length & ~3
    words = np.ascontiguousarray(data[:, :whole]).view("<u4")
    h = np.full(count, _SEED ^ np.uint32(length), dtype=np.uint32)
    for at in range(whole // 4):
        k = words[:, at] * _M
        h = (h * _M) ^ ((k ^ (k >> np.uint32(24))) * _M)
    if length > whole:
        for at in range(whole, length):
            h ^= data[:, at].astype(np.uint32) << np.uint32(8 * (at - whole))
        h = h * _M
    h = (h ^ (h >> np.uint32(13))) * _M
    return h ^ (h >> np.uint32(15))
