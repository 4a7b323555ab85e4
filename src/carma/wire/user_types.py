"""What `GET /users` answers: what users had of the GPUs, have now, and may have at most."""

from __future__ import annotations

from carma.wire.api_types import Answer


class UserView(Answer, frozen=True, kw_only=True):
    """Card-hours fade with fairness.half_life_s. A limit that is None does not exist."""

    user: str
    uid: int
    share: float = 1.0  # how much the user is due beside others (fairness.shares)
    memory_h: float = 0.0  # whole cards' memory booked, in hours
    sm_h: float = 0.0  # whole cards' SM activity, in hours
    level: float = 0.0  # what turns go by: hours, weighted, and what is held now, for the share; the lowest goes first
    running: int = 0
    gpus: int = 0  # of running tasks, added up
    booked_mib: int = 0
    waiting: int = 0
    running_limit: int | None = None
    gpus_limit: int | None = None
    memory_limit_mib: int | None = None
    waiting_limit: int | None = None
