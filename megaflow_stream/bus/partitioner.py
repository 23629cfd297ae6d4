"""The partition of a key, as every Kafka client chooses it: murmur2 (org.apache.kafka.common.utils.Utils)."""

from __future__ import annotations

_SEED, _M, _MASK = 0x9747B28C, 0x5BD1E995, 0xFFFFFFFF


def murmur2(data: bytes) -> int:
    """The 32-bit hash of `data`, unsigned."""
    length = len(data)
    h = (_SEED ^ length) & _MASK
    for at in range(0, length & ~3, 4):
        k = (int.from_bytes(data[at : at + 4], "little") * _M) & _MASK
        k = ((k ^ (k >> 24)) * _M) & _MASK
        h = ((h * _M) & _MASK) ^ k
    if rest := length & 3:
        h = ((h ^ int.from_bytes(data[length - rest :], "little")) * _M) & _MASK
    h = ((h ^ (h >> 13)) * _M) & _MASK
    return h ^ (h >> 15)


def partition_of(key: bytes, partitions: int) -> int:
    """The partition, of `partitions`, that a record with this key belongs to."""
    return (murmur2(key) & 0x7FFFFFFF) % partitions
