"""Every object of a state as bytes: two images are equal if nothing in the state has changed between them, not even the
order of a set, or a figure that was remembered for later."""

from __future__ import annotations

import io
import pickle

from carma.core.scheduling.policy import Policy
from carma.core.state import State


class _Pickler(pickle.Pickler):
    def persistent_id(self, found: object) -> str | None:
        return found.name if isinstance(found, Policy) else None  # its functions have no state


def image(state: State) -> bytes:
    written = io.BytesIO()
    _Pickler(written).dump(state)
    return written.getvalue()
