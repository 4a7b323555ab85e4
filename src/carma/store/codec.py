"""Rows as JSON by msgspec, strict in both directions.

A value that could not be read back is refused before it is stored, because one unreadable event blocks every start.
"""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from carma.core.model.events import Durable
from carma.core.model.task import Task
from carma.core.ports import Checkpoint, PastRun
from carma.errors import StoreError

_encode = msgspec.json.Encoder().encode
_events: msgspec.json.Decoder[tuple[Durable, ...]] = msgspec.json.Decoder(tuple[Durable, ...])
_event: msgspec.json.Decoder[Durable] = msgspec.json.Decoder(Durable)
_part: msgspec.json.Decoder[dict[str, str] | tuple[str, ...]] = msgspec.json.Decoder(dict[str, str] | tuple[str, ...])
read_event, read_events = _event.decode, _events.decode
read_task = msgspec.json.Decoder(Task).decode
read_checkpoint = msgspec.json.Decoder(Checkpoint).decode
read_run = msgspec.json.Decoder(PastRun).decode
read_part = _part.decode  # an environment or a command, from the table `parts`


def write(value: msgspec.Struct | dict[str, str] | tuple[str, ...]) -> str:
    """JSON text. Raises StoreError for lone surrogates, which JSON cannot hold."""
    try:
        return _encode(value).decode()
    except (UnicodeError, TypeError, ValueError) as error:
        raise _unstorable(value, error) from error


def write_event(event: Durable) -> str:
    """As `write`, with a test that it reads back: NaN, for example, would be written as null."""
    body = write(event)
    try:
        read_event(body)
    except msgspec.DecodeError as error:
        raise _unstorable(event, error) from error
    return body


def digest(command: tuple[str, ...], directory: str) -> bytes:
    """A key of fixed length for a command in a directory."""
    return blake2b(_encode((command, directory)), digest_size=16).digest()


def _unstorable(value: object, error: Exception) -> StoreError:
    names: dict[type, str] = {dict: "the environment", tuple: "the command"}
    return StoreError(
        f"{names.get(type(value), type(value).__name__)} holds a value that cannot be stored: {error}",
        "Only UTF-8 text and finite numbers can be stored.",
    )
