"""Caches trials by key: one compressed file for each, written completely or not at all. A damaged file is deleted.

Refusals stay in memory and expire, because their cause may go away.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from carma.core.model.values import NoEstimate
from carma.trial.protocol import Trial

ENTRIES, TOTAL_BYTES = 2_000, 2**30
REFUSAL_S = 60.0
_SUFFIX = ".trial"


class TrialCache:
    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """`folder` is created for the first trial."""
        self._folder = folder
        self._clock = clock
        self._lock = threading.Lock()
        self._refused: dict[str, tuple[float, NoEstimate]] = {}  # with the time at which it expires

    def get(self, key: str) -> Trial | NoEstimate | None:
        with self._lock:
            expires_s, refusal = self._refused.get(key, (0.0, None))
        if refusal is not None and self._clock() < expires_s:
            return refusal
        path = self._folder / (key + _SUFFIX)
        with contextlib.suppress(OSError):
            packed = path.read_bytes()
            os.utime(path)
            try:
                return msgspec.msgpack.decode(zlib.decompress(packed), type=Trial)
            except (zlib.error, msgspec.MsgspecError):
                path.unlink()
        return None

    def put(self, key: str, answer: Trial | NoEstimate) -> None:
        if isinstance(answer, Trial):
            with contextlib.suppress(OSError):  # with a full disk the trial runs again next time
                self._write(key, zlib.compress(msgspec.msgpack.encode(answer), 1))
            return
        with self._lock:
            now_s = self._clock()
            self._refused = {name: kept for name, kept in self._refused.items() if now_s < kept[0]}
            self._refused[key] = (now_s + REFUSAL_S, answer)

    def _write(self, key: str, packed: bytes) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished = self._folder / f"{key}.{os.getpid()}.{threading.get_ident()}.part"
        unfinished.write_bytes(packed)
        os.replace(unfinished, self._folder / (key + _SUFFIX))
        _delete_oldest(self._folder)


def _delete_oldest(folder: Path) -> None:
    """Deletes the least recently used files beyond the limits."""
    found = []
    for path in folder.glob("*" + _SUFFIX):
        with contextlib.suppress(OSError):
            status = path.stat()
            found.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in found)
    for count, (_, size, path) in zip(range(len(found), 0, -1), sorted(found), strict=True):
        if count <= ENTRIES and total <= TOTAL_BYTES:
            return
        path.unlink(missing_ok=True)
        total -= size
