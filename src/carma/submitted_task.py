"""`carma.submit` for Python programs: queue a task, wait for its end, read its output.

It uses the socket that the command line uses. Nothing here prints or reads settings.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from carma.client import Client
from carma.core.model.units import parse_mib
from carma.core.model.values import Dependency, TaskId, TaskSpec
from carma.errors import Unreachable
from carma.paths import find_socket
from carma.wire.api_types import SubmitRequest, TaskView

T = TypeVar("T")
RETRY_S = 1.0
MAX_ABSENCE_S = 300.0  # of the daemon while a task is waited for
PIECE_S = 30.0  # of a long wait


class SubmittedTask:
    """A task of the daemon that serves this user. Each method asks the daemon."""

    def __init__(self, task: int) -> None:
        self.id = task

    def __repr__(self) -> str:
        return f"SubmittedTask({self.id})"

    def view(self) -> TaskView:
        """The task now: state, exit_code, gpu_indices and the other fields of the API."""
        return _ask(lambda client: client.task(self.id))

    def wait(self, timeout_s: float | None = None) -> TaskView:
        """Waits for the end of the task, also while the daemon is restarted. Raises TimeoutError."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        gone_at: float | None = None
        while True:
            left_s = PIECE_S if until is None else min(PIECE_S, max(0.0, until - time.monotonic()))
            try:
                view = _ask(partial(Client.wait, task=self.id, timeout_s=left_s))
            except Unreachable:
                gone_at = gone_at or time.monotonic()
                if time.monotonic() - gone_at > MAX_ABSENCE_S:
                    raise
                time.sleep(min(RETRY_S, left_s))
            else:
                gone_at = None
                if view.state == "finished":
                    return view
            if until is not None and time.monotonic() >= until:
                raise TimeoutError(f"task {self.id} has not ended within {timeout_s:g} s; it continues")

    def logs(self, stream: str = "stdout") -> str:
        """What the newest attempt has written so far: `stdout` or `stderr`. A file that the submission named is not
        read."""
        return _ask(lambda client: b"".join(client.logs(self.id, stream=stream))).decode(errors="replace")

    def cancel(self) -> None:
        _ask(lambda client: client.cancel(self.id))


def submit(
    command: Sequence[str],
    *,
    gpus: int = 1,
    gpu_memory: int | str | None = None,
    name: str = "",
    directory: str | os.PathLike[str] | None = None,
    environment: Mapping[str, str] | None = None,
    after: Iterable[SubmittedTask | int] = (),
    **fields: Any,
) -> SubmittedTask:
    """Queues a command, as `carma submit` does. `gpu_memory` is MiB or a text such as "12GiB" (None: it is estimated);
    `environment` None is that of this process; `after`: tasks that must succeed first. `fields` are further fields of
    `TaskSpec`, for example time_limit_s=3600.0, priority=-5 or exclusive=True."""
    if isinstance(command, str):
        raise TypeError(f"the command is a list of words, for example {command.split()!r}")
    dependencies = [Dependency(TaskId(each if isinstance(each, int) else each.id), "ok") for each in after]
    spec = TaskSpec(
        command=tuple(command),
        directory=os.path.abspath(directory or os.getcwd()),
        environment=dict(os.environ if environment is None else environment),
        umask=_umask(),
        name=name,
        gpus=gpus,
        gpu_memory_mib=parse_mib(gpu_memory) if isinstance(gpu_memory, str) else gpu_memory,
        after=tuple(dependencies),
        **fields,
    )
    return SubmittedTask(_ask(lambda client: client.submit(SubmitRequest(spec=spec))).ids[0])


def _ask(question: Callable[[Client], T]) -> T:
    with Client(find_socket(os.environ)) as client:
        return question(client)


def _umask() -> int:
    umask = os.umask(0o077)
    os.umask(umask)
    return umask
