"""The HTTP side on a real socket, over the real shell and a store in memory; only who connects is made up.

with serving(tmp_path) as served:
    answer = served.client().submit(served.request("true"))
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

from carma.client import Client
from carma.config import LoadedSettings, Settings, catalogue
from carma.core.model.events import (
    AttemptEnded,
    AttemptStarted,
    Durable,
    GpusFound,
    GpusSampled,
    TaskEstimated,
    TaskPlaced,
)
from carma.core.model.outcome import Outcome, Succeeded
from carma.core.model.values import Activity, AttemptKey, Booking, GpuId, GpuSample, Placement, TaskId, TaskSpec
from carma.core.policies import magm
from carma.core.propose import propose
from carma.core.state import State
from carma.daemon.api.application import make_app
from carma.daemon.auth import Authenticator, Peer, UserNames
from carma.daemon.http.http_server import HttpLimits, HttpServer
from carma.daemon.http.socket_address import Address
from carma.daemon.runtime import SteadyClock
from carma.daemon.shell import Shell, Subscription
from carma.daemon.state_checkpoint import checkpoint, forget
from carma.paths import Paths
from carma.store.memory import MemoryStore
from carma.testing.builders import gpu
from carma.wire.api_types import SubmitRequest
from tests.unit.daemon.shells import check_in_process, make_estimates, writing

T = TypeVar("T")
LIMIT_S = 180.0
DAEMON, ALICE, BOB = 500, 1001, 1002
PEOPLE = {0: "root", DAEMON: "carmad", ALICE: "alice", BOB: "bob", 1003: "carol"}


def until(condition: Callable[[], bool]) -> None:
    """Poll; generous, since the machine may be busy."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)


class Watched(Shell):
    """Counts who waits and who has subscribed, so that a test knows when to go on."""

    waiting = 0
    subscribed = 0

    async def wait_for(self, predicate: Callable[[State], bool], timeout_s: float) -> bool:
        self.waiting += 1
        try:
            return await super().wait_for(predicate, timeout_s)
        finally:
            self.waiting -= 1

    def subscribe(self) -> Subscription:
        self.subscribed += 1
        return super().subscribe()


class Served:
    def __init__(self, home: Path, own_uid: int, settings: Settings, limits: HttpLimits, gpus: int) -> None:
        self.uid = own_uid  # who connects next
        self.own_uid = own_uid
        self.home = home
        self.limits = limits
        self.gpus = gpus
        self.store = MemoryStore()
        self.paths = Paths(
            layout="home",
            config_file=home / "config.toml",
            system_config_file=None,
            state_dir=home,
            log_dir=home / "logs",
            socket=home / "s",
        )
        self.paths.log_dir.mkdir()
        self.settings = settings
        self.loop = asyncio.new_event_loop()
        self._clients: list[Client] = []
        self._up = threading.Event()
        self._thread = threading.Thread(target=self.loop.run_until_complete, args=(self._main(),))
        self._thread.start()
        until(lambda: self._up.is_set() or not self._thread.is_alive())
        assert self._up.is_set(), "the server ended while it started"

    async def _main(self) -> None:
        self.shell = Watched(
            state=State(self.settings.rules, magm.POLICY),
            sequence=0,
            store=self.store,
            clock=SteadyClock(),
            loaded=LoadedSettings(self.settings, dict.fromkeys(catalogue(), "default")),
            paths=self.paths,
        )
        self.stopping = asyncio.Event()
        self.estimates = make_estimates(self.shell)
        names = UserNames(PEOPLE.__getitem__)
        authenticator = Authenticator(self.settings.daemon.admins, own_uid=self.own_uid, names=names)
        listener = Address(self.paths.socket, 0o600).bind()
        self.server = HttpServer(
            make_app(self.shell, self.estimates, check_in_process, authenticator),
            listener,
            self.limits,
            peer_of=lambda _socket: Peer(1, self.uid, self.uid),
        )
        serving = asyncio.create_task(self.server.run())
        async with writing(self.shell):
            if self.gpus:
                await self.shell.commit([GpusFound(self.shell.clock.now(), tuple(map(gpu, range(self.gpus))))])
                self.look()
            self._up.set()
            await self.stopping.wait()
            self.server.stop()
            self.shell.release()
            await serving

    def look(self) -> None:
        """A sample of idle GPUs."""
        now = self.shell.clock.now()
        self.shell.observe(
            GpusSampled(
                now,
                tuple(
                    GpuSample(
                        gpu=found,
                        at=now,
                        memory_used_mib=0,
                        activity=Activity(sm_active=0.0, sm_occupancy=0.0, dram_active=0.0),
                        processes=(),
                    )
                    for found in self.shell.state.gpus
                ),
            )
        )

    def log_paths(self, key: AttemptKey) -> tuple[Path, Path]:
        directory = self.paths.log_dir / str(key)
        return directory / "stdout.log", directory / "stderr.log"

    @property
    def open_connections(self) -> int:
        return len(self.server._uvicorn.server_state.connections)

    @property
    def open_requests(self) -> int:
        return len(self.server._uvicorn.server_state.tasks)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(LIMIT_S)

    def emit(self, *events: Durable) -> None:
        self.call(self.shell.commit(events))

    def stop(self) -> None:
        for client in self._clients:
            client.close()
        self.loop.call_soon_threadsafe(self.stopping.set)
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()
        self.loop.close()

    # -- clients -------------------------------------------------------------------------------------------------
    def client(self, uid: int | None = None) -> Client:
        """A client of this user; its connection is made before it is returned."""
        self.uid = self.own_uid if uid is None else uid
        made = Client(self.paths.socket, timeout_s=LIMIT_S)
        self._clients.append(made)
        made.openapi()
        return made

    @contextlib.contextmanager
    def raw(self) -> Iterator[socket.socket]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as made:
            made.settimeout(LIMIT_S)
            made.connect(str(self.paths.socket))
            yield made

    def request(self, *command: str, directory: str = "/", **fields: Any) -> SubmitRequest:
        extra = {name: fields.pop(name) for name in ("array", "held", "nonblock", "dry_run") if name in fields}
        environment = fields.pop("environment", {"PATH": "/usr/bin:/bin"})
        spec = TaskSpec(command=command or ("true",), directory=directory, environment=environment, **fields)
        return SubmitRequest(spec=spec, **extra)

    # -- what the rest of the daemon would do ----------------------------------------------------------------------
    def estimated(self, *tasks: int) -> None:
        self.emit(*(TaskEstimated(self.shell.clock.now(), TaskId(task), None) for task in tasks))

    def place(self, task: int, *indices: int, mib: int = 4_000, alone: bool = False) -> AttemptKey:
        """Placed and started, on GPU 0 if nothing is said."""
        before = self.shell.state.tasks[TaskId(task)].key.attempt
        key = AttemptKey(TaskId(task), before + 1)
        gpus = tuple(GpuId(f"GPU-{index}") for index in indices or (0,))
        now = self.shell.clock.now()
        placement = Placement(gpus=gpus, booking=Booking(memory_mib=mib, source="declared", alone=alone))
        self.emit(TaskPlaced(now, key, placement, "for the test"), AttemptStarted(now, key, 4321))
        return key

    def end(self, key: AttemptKey, outcome: Outcome | None = None) -> None:
        """Ended, and whatever follows from it."""
        self.emit(AttemptEnded(self.shell.clock.now(), key, outcome or Succeeded(), 3_000))
        self.settle()

    def settle(self) -> None:
        while due := [
            event for event in propose(self.shell.state, self.shell.clock.now()) if not isinstance(event, TaskPlaced)
        ]:
            self.emit(*due)

    def archive(self) -> None:
        """Finished tasks leave memory."""

        async def save() -> None:
            saved, finished = checkpoint(self.shell.state, self.shell.sequence)
            self.store.save(saved, finished)
            forget(self.shell.state, finished)

        self.call(save())


@contextlib.contextmanager
def serving(
    *, own_uid: int = DAEMON, settings: Settings = Settings(), limits: HttpLimits = HttpLimits(), gpus: int = 2
) -> Iterator[Served]:
    home = Path(tempfile.mkdtemp(prefix="carma-api-", dir="/tmp"))
    try:
        served = Served(home, own_uid, settings, limits, gpus)
        try:
            yield served
        finally:
            served.stop()
    finally:
        shutil.rmtree(home)
