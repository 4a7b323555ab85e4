"""What the checks of `carma doctor` look at, each thing once: the machine, the daemon, the settings that hold."""

from __future__ import annotations

import os
from functools import cached_property
from typing import Any, Literal

import msgspec

from carma.client import Client
from carma.core.model.values import Capabilities, Gpu, GpuId
from carma.core.telemetry.window import METRICS
from carma.errors import CarmaError, NoGpus
from carma.monitor.card_modes import MachineFacts
from carma.wire.api_types import ServerView, SettingView

Verdict = Literal["ok", "warn", "bad"]
_METRICS_OF = {"nvml": (), "processes": ("sm_active",)}  # by source; the others provide all metrics
ANSWER_S = 2.0  # for a daemon that is asked by the way


class Finding(msgspec.Struct, frozen=True):
    check: str
    verdict: Verdict
    text: str
    hint: str = ""
    limitation: str = ""  # what the server cannot do, and the consequence, in one line; `carma up` prints it


class Found(msgspec.Struct, frozen=True):
    """The GPUs that tasks can use, sentences about those they cannot, or why there are none."""

    gpus: tuple[Gpu, ...] = ()
    problems: tuple[str, ...] = ()
    dcgm_problem: str = ""  # why DCGM does not give activity, where a GPU would need it
    error: NoGpus | None = None


class Look:
    """Everything is asked for when it is first needed. Made anew for each run of the doctor."""

    @cached_property
    def server(self) -> ServerView | None:
        """The daemon that serves this user; None where none answers."""
        from carma.cli.connection import connect

        try:
            with connect(ANSWER_S) as client:
                return client.server()
        except CarmaError:
            return None

    @property
    def elsewhere(self) -> ServerView | None:
        """That daemon, where it is another user's: what it keeps is then not this user's to write."""
        server = self.server
        return server if server is not None and os.geteuid() not in (0, server.uid) else None

    @cached_property
    def virtual(self) -> int:
        """How many virtual GPUs the daemon has; 0 when there is no daemon, or when it has real ones."""
        from carma.cli.connection import connect

        try:
            with connect(ANSWER_S) as client:
                found = client.gpus()
        except CarmaError:
            return 0
        return len(found) if all(gpu.kind == "virtual" for gpu in found) else 0

    @cached_property
    def machine(self) -> MachineFacts | None:
        """None where no driver answers; `found` says why."""
        from carma.monitor import card_modes as facts

        try:
            return facts.open_facts()
        except NoGpus:
            return None

    @cached_property
    def found(self) -> Found:
        from carma.monitor import nvml

        try:
            sampler = nvml.open_nvml()
        except NoGpus as error:
            return Found(error=error)
        try:
            return Found(sampler.gpus(), sampler.problems(), sampler.activity_problem() or "")
        finally:
            sampler.close()

    @cached_property
    def running_settings(self) -> dict[str, SettingView]:
        """Those of the daemon that answers; none where none does."""
        from carma.cli.connection import connect

        try:
            with connect(ANSWER_S) as client:
                return {line.name: line for line in client.settings()}
        except CarmaError:
            return {}

    @cached_property
    def next_settings(self) -> dict[str, Any]:
        """Those that a daemon started now would have; none where they cannot be read."""
        from carma.config import describe, load_settings
        from carma.paths import find_paths

        try:
            loaded = load_settings(find_paths(os.environ), os.environ)
        except CarmaError:  # the check of the settings says what is wrong with them
            return {}
        lines = {line.name: line.value for line in describe(loaded.settings, loaded.origins)}
        told: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(lines))  # as the running daemon's come
        return told

    def setting(self, name: str, default: Any) -> Any:
        """What holds: the running daemon's word, which flags may have given it, before that of the files."""
        if self.running_settings:
            told = self.running_settings.get(name)
            return default if told is None else told.value
        return self.next_settings.get(name, default)


class ServedLook(Look):
    """The server as its daemon describes it: no driver library is opened."""

    def __init__(self, client: Client) -> None:
        views = client.gpus()
        self.server = client.server()
        self.running_settings = {line.name: line for line in client.settings()}
        self.virtual = len(views) if all(view.kind == "virtual" for view in views) else 0
        self.machine = None if self.virtual else MachineFacts()
        self.found = Found(
            tuple(
                Gpu(
                    id=GpuId(view.gpu),
                    index=view.index,
                    name=view.name,
                    memory_mib=view.memory_mib,
                    capabilities=Capabilities(metrics=_METRICS_OF.get(view.metrics, METRICS), source=view.metrics),
                )
                for view in views
            )
        )
