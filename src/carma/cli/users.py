"""`carma users`: what each user had, has now, and may have at most."""

from __future__ import annotations

from carma.cli.verb import table_flags, verb
from carma.wire.user_types import UserView

EXAMPLES = """
carma users
carma users --json
"""


@verb("users", examples=EXAMPLES)
@table_flags
def command(as_json: bool, no_header: bool, wide: bool) -> None:
    """What users had of the GPUs, have now, and may have: yours, or everybody's for an administrator.

    Whose turn is next stands first, where users take turns (fairness.enabled). MEM h and SM h are whole cards' memory
    booked and SM activity, in hours; both fade with fairness.half_life_s. 2/8 is 2 of the 8 that the quota allows.
    """
    from carma.cli.connection import connect

    with connect() as client:
        users = client.users()
    if as_json:
        from carma.cli.output import print_json

        return print_json(users)
    return _table(users, header=not no_header, wide=wide)


def _table(users: list[UserView], *, header: bool, wide: bool) -> None:
    from carma.cli.output import Column, print_table

    columns = [
        Column("USER", flexible=True, most=24),
        Column("SHARE", right=True),
        Column("MEM h", right=True),
        Column("SM h", right=True),
        Column("RUNNING", right=True),
        Column("GPUS", right=True),
        Column("MEMORY GiB", right=True),
        Column("WAITING", right=True),
    ]
    print_table(columns, [_row(user) for user in users], header, wide)


def _row(user: UserView) -> list[str]:
    return [
        user.user,
        f"{user.share:g}",
        f"{user.memory_h:.1f}",
        f"{user.sm_h:.1f}",
        _of(str(user.running), user.running_limit),
        _of(str(user.gpus), user.gpus_limit),
        _of(_gib(user.booked_mib), None if user.memory_limit_mib is None else _gib(user.memory_limit_mib)),
        _of(str(user.waiting), user.waiting_limit),
    ]


def _gib(mib: int) -> str:
    return f"{mib / 1024:.1f}"


def _of(have: str, most: object | None) -> str:
    return have if most is None else f"{have}/{most}"
