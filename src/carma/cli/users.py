"""`carma users`: GPU use, quotas and shares of users."""

from __future__ import annotations

from carma.cli.connection import ask
from carma.cli.output import Column, Field, print_json, print_records
from carma.cli.verb import Listing, table_flags, verb
from carma.client import Client
from carma.wire.report_types import UserView

EXAMPLES = """
carma users
carma users --json
"""


def _of(value: object, limit: object | None) -> str:
    return str(value) if limit is None else f"{value}/{limit}"


def _memory(user: UserView) -> str:
    limit = user.memory_limit_mib
    return _of(f"{user.booked_mib / 1024:.1f}", None if limit is None else f"{limit / 1024:.1f}")


FIELDS: tuple[Field[UserView], ...] = (
    (Column("USER", flexible=True, most=24), lambda user: user.user),
    (Column("SHARE", right=True), lambda user: f"{user.share:g}"),
    (Column("MEM GPU-h", right=True), lambda user: f"{user.memory_h:.1f}"),
    (Column("SM GPU-h", right=True), lambda user: f"{user.sm_h:.1f}"),
    (Column("RUNNING", right=True), lambda user: _of(user.running, user.running_limit)),
    (Column("GPUS", right=True), lambda user: _of(user.gpus, user.gpus_limit)),
    (Column("MEMORY GiB", right=True), _memory),
    (Column("WAITING", right=True), lambda user: _of(user.waiting, user.waiting_limit)),
)


@verb("users", examples=EXAMPLES)
@table_flags
def command(listing: Listing) -> None:
    """GPU use, quotas and shares of users: of all users for an administrator, else yours.

    With fairness.enabled, the user whose task starts next comes first. MEM GPU-h and SM GPU-h are the booked memory
    and the SM activity of the user's tasks, in hours of a whole GPU; both decay with fairness.half_life_s. 2/8 means 2
    of a quota of 8.
    """
    users = ask(Client.users)
    return print_json(users) if listing.as_json else print_records(FIELDS, users, listing.header, listing.wide)
