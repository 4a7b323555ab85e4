"""What the handlers of the routes share: the parts of the daemon that they use, the task of a route, the filters of the
lists, and views for the user who asks.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import get_args

from carma.core.model.status import Status
from carma.core.model.task import Task
from carma.core.model.values import Owner, TaskId, TaskSpec, tag_of
from carma.daemon.auth import Authenticator, Identity, require_owner, uid_of
from carma.daemon.estimating import Estimates
from carma.daemon.http.request import ApiCall
from carma.daemon.shell import Shell
from carma.daemon.views.task_views import OUTCOME_CODES, ViewContext, task_views
from carma.errors import NotFound, Usage
from carma.wire.api_types import TaskView

CheckFiles = Callable[[TaskSpec, Owner], Awaitable[None]]  # raises NotRunnable or Busy

_OUTCOMES_BY_CODE = {code.lower(): tag_of(kind) for kind, code in OUTCOME_CODES.items()}
_OUTCOMES = frozenset(_OUTCOMES_BY_CODE.values())
_STATUSES = frozenset(tag_of(kind) for kind in get_args(Status))
_STATES = _STATUSES | _OUTCOMES | {"pd", "h", "r", "cg"} | _OUTCOMES_BY_CODE.keys()


@dataclass(eq=False)
class Handlers:
    shell: Shell
    estimates: Estimates
    check_files: CheckFiles  # of each submitted command, with the rights of its owner
    authenticator: Authenticator
    # Submissions that are checked but not yet part of the state, since several are committed in one transaction:
    # the first id of each, with its user and its number of tasks.
    pending: dict[TaskId, tuple[int, int]] = field(default_factory=dict)

    def _context(self, who: Identity) -> ViewContext:
        shell = self.shell
        return ViewContext(shell.state, shell.clock.now(), who, shell.paths.log_dir, self.estimates.stage)

    def _view(self, task: Task, who: Identity) -> TaskView:
        return next(task_views([task], self._context(who)))

    async def _own_task(self, call: ApiCall) -> Task:
        """The task of a route that only its owner and administrators may use."""
        found = await self.shell.look_up(call.task)
        require_owner(call.who, found, call.route.name)
        return found


def wanted_uid(call: ApiCall) -> int | None:
    """The user whose tasks are wanted: the caller, a named user, or everyone (None)."""
    name: str | None = call.query.get("user")
    if name is None:
        return call.who.uid
    if name == "all":
        return None
    uid = uid_of(name)
    if uid is None:
        raise NotFound(f"there is no user {name[:40]!r}", "'all' stands for all users")
    return uid


def wanted_state(call: ApiCall) -> str | None:
    """The wanted state, by its name or its short code."""
    state: str | None = call.query.get("state")
    if state is None:
        return None
    if state.lower() not in _STATES:
        raise Usage(f"there is no state {state[:40]!r}", "one of " + ", ".join(sorted(_STATES)))
    return state.lower()


def wanted_outcomes(call: ApiCall) -> Collection[str] | None:
    """The outcomes that belong to the wanted state; None: all of them."""
    state = wanted_state(call)
    if state is None or state == "finished":
        return None
    return {kind for kind in (state, _OUTCOMES_BY_CODE.get(state)) if kind in _OUTCOMES}
