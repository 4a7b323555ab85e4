"""The allocator's history of one run in few bytes: columns, each compressed by zlib, after a line of JSON.

Addresses are numbered in the order in which they first appear. A table of the addresses themselves, less the lowest,
says which blocks lie in which segment. The steps of a training loop repeat, so a case takes some tens of KiB.
"""

from __future__ import annotations

import json
import struct
import zlib
from array import array
from collections.abc import Iterable, Iterator
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

ACTIONS = (
    *("alloc", "free_requested", "free_completed"),
    *("segment_alloc", "segment_free", "segment_map", "segment_unmap"),
    *("oom", "snapshot"),
)
CAP_EVENTS = 200_000
_LENGTHS = struct.Struct("<II")


class Event(NamedTuple):
    action: str
    size: int
    address: int
    stream: int


def pack(case_id: str, entries: Iterable[dict[str, Any]]) -> bytes:
    """One record of torch's trace entries (action, size, addr, stream), cut at the cap."""
    actions, streams = bytearray(), bytearray()
    sizes, ids = array("q"), array("i")
    addresses: dict[int, int] = {}
    stream_ids: dict[int, int] = {}
    total = 0
    for entry in entries:
        total += 1
        if len(actions) >= CAP_EVENTS or entry["action"] not in ACTIONS:
            continue
        actions.append(ACTIONS.index(entry["action"]))
        sizes.append(int(entry.get("size", 0)))
        address = int(entry.get("addr", 0))
        ids.append(addresses.setdefault(address, len(addresses)))
        streams.append(min(255, stream_ids.setdefault(int(entry.get("stream", 0)), len(stream_ids))))
    base = min(addresses, default=0)
    table = array("q", [address - base for address in addresses])
    columns = [bytes(actions), _delta(sizes).tobytes(), _delta(ids).tobytes(), bytes(streams), table.tobytes()]
    packed = [zlib.compress(column, 9) for column in columns]
    header = {"id": case_id, "events": len(actions), "seen": total, "columns": [len(column) for column in packed]}
    head = json.dumps(header).encode()
    body = b"".join(packed)
    return _LENGTHS.pack(len(head), len(body)) + head + body


def unpack(record: bytes) -> tuple[str, list[Event]]:
    """The case's id and its events, with addresses less the lowest one."""
    head_len, _ = _LENGTHS.unpack_from(record)
    header = json.loads(record[_LENGTHS.size : _LENGTHS.size + head_len])
    at = _LENGTHS.size + head_len
    columns = []
    for length in header["columns"]:
        columns.append(zlib.decompress(record[at : at + length]))
        at += length
    actions, sizes, ids, streams, addresses = columns
    table = array("q", addresses)
    rows = zip(actions, accumulate(array("q", sizes)), accumulate(array("i", ids)), streams, strict=True)
    return header["id"], [Event(ACTIONS[action], size, table[number], stream) for action, size, number, stream in rows]


def records(data: bytes) -> Iterator[bytes]:
    """The records of one file, in order; a last one that was cut short is left out."""
    at = 0
    while at + _LENGTHS.size <= len(data):
        head_len, body_len = _LENGTHS.unpack_from(data, at)
        end = at + _LENGTHS.size + head_len + body_len
        if end > len(data):
            return
        yield data[at:end]
        at = end


def _delta(values: array[int]) -> array[int]:
    return array(values.typecode, [value - before for before, value in pairwise([0, *values])])
