"""Events as server-sent events. A reader that is too slow is disconnected; the daemon never waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal

import msgspec

from carma.core.model.events import Durable
from carma.core.state import State
from carma.daemon.subscribers import Subscription
from carma.daemon.views.story import as_on_record, event_name, sentence, task_of
from carma.wire.api_types import StreamEvent

HEARTBEAT_S = 15.0
_HEARTBEAT = b": heartbeat\n\n"


def encode(sequence: int, event: Durable, state: State) -> bytes:
    name = event_name(event)
    text = sentence(as_on_record(event, state.tasks), state.gpus)
    shown = StreamEvent(sequence=sequence, at=event.at, event=name, task=task_of(event), text=text)
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (sequence, name.encode("ascii"), msgspec.json.encode(shown))


async def server_sent_events(
    subscription: Subscription, state: Callable[[], State], closing: asyncio.Event, heartbeat_s: float = HEARTBEAT_S
) -> AsyncIterator[bytes]:
    """The body of the stream. It ends with the subscription, whose buffer is bounded.

    The first comment is sent at once, so that a client knows that it is subscribed before it does anything else.
    """
    events = aiter(subscription)
    ended: asyncio.Future[Literal[True]] = asyncio.ensure_future(closing.wait())
    coming: asyncio.Future[tuple[int, Durable]] | None = None
    try:
        yield b": subscribed\n\n"
        while not closing.is_set():
            coming = coming or asyncio.ensure_future(anext(events))
            either: set[asyncio.Future[Any]] = {coming, ended}
            await asyncio.wait(either, timeout=heartbeat_s, return_when=asyncio.FIRST_COMPLETED)
            if coming.done():
                try:
                    sequence, event = coming.result()
                except StopAsyncIteration:
                    return
                coming = None
                yield encode(sequence, event, state())
            elif not closing.is_set():
                yield _HEARTBEAT
    finally:
        ended.cancel()
        if coming is not None:
            coming.cancel()
        subscription.close()
