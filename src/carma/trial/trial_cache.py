"""Caches trials by key, in memory and on disk. Refusals expire, because their cause may go away.

On disk each trial is one compressed file, written completely or not at all. A damaged file is deleted.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import msgspec

from carma.core.model.values import NoEstimate
from carma.trial.protocol import Trial

ENTRIES, MEMORY_BYTES = 256, 256 * 2**20
DISK_ENTRIES, DISK_BYTES = 2_000, 2**30
REFUSAL_S = 60.0
_SUFFIX = ".trial"


class TrialCache:
    def __init__(self, folder: Path | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """`folder` is created for the first trial; None: nothing outlives the process."""
        self._folder = folder
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._refused: dict[str, tuple[float, NoEstimate]] = {}

    def get(self, key: str) -> Trial | NoEstimate | None:
        with self._lock:
            at, refusal = self._refused.get(key, (0.0, None))
            if refusal is not None and self._clock() < at + REFUSAL_S:
                return refusal
            packed = self._kept.get(key)
        if packed is not None:
            self._keep(key, packed)
            return _unpack(packed)
        return self._from_disk(key)

    def put(self, key: str, answer: Trial | NoEstimate) -> None:
        if isinstance(answer, NoEstimate):
            with self._lock:
                now = self._clock()
                self._refused = {name: kept for name, kept in self._refused.items() if now < kept[0] + REFUSAL_S}
                self._refused[key] = (now, answer)
            return
        packed = zlib.compress(msgspec.msgpack.encode(answer), 1)
        self._keep(key, packed)
        if self._folder is not None:
            with contextlib.suppress(OSError):  # with a full disk the trial runs again next time
                self._to_disk(self._folder, key, packed)

    def _keep(self, key: str, packed: bytes) -> None:
        with self._lock:
            self._kept[key] = packed
            self._kept.move_to_end(key)
            while len(self._kept) > ENTRIES or sum(map(len, self._kept.values())) > MEMORY_BYTES:
                self._kept.popitem(last=False)

    def _from_disk(self, key: str) -> Trial | None:
        if self._folder is None:
            return None
        path = self._folder / (key + _SUFFIX)
        try:
            packed = path.read_bytes()
        except OSError:
            return None
        trial = _unpack(packed)
        with contextlib.suppress(OSError):
            if trial is None:
                path.unlink()
            else:
                os.utime(path)
                self._keep(key, packed)
        return trial

    def _to_disk(self, folder: Path, key: str, packed: bytes) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished = folder / f"{key}.{os.getpid()}.{threading.get_ident()}.part"
        unfinished.write_bytes(packed)
        os.replace(unfinished, folder / (key + _SUFFIX))
        _make_room(folder)


def _unpack(packed: bytes) -> Trial | None:
    try:
        return msgspec.msgpack.decode(zlib.decompress(packed), type=Trial)
    except (zlib.error, msgspec.MsgspecError):
        return None


def _make_room(folder: Path) -> None:
    """Deletes the least recently used."""
    found = []
    for path in folder.glob("*" + _SUFFIX):
        with contextlib.suppress(OSError):
            status = path.stat()
            found.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in found)
    for count, (_, size, path) in zip(range(len(found), 0, -1), sorted(found), strict=True):
        if count <= DISK_ENTRIES and total <= DISK_BYTES:
            return
        path.unlink(missing_ok=True)
        total -= size
