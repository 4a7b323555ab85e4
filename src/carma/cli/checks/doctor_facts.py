"""The facts that the checks of `carma doctor` examine, each read once: the machine, the daemon and the settings."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cached_property
from typing import Any, Literal, TypeVar

import msgspec

from carma.cli.connection import ask
from carma.client import Client
from carma.config import describe, load_settings
from carma.core.model.values import Capabilities, Gpu, GpuId
from carma.core.telemetry.window import METRICS
from carma.errors import CarmaError, NoGpus
from carma.monitor import card_modes, nvml
from carma.paths import find_paths
from carma.wire.api_types import GpuView, ServerView, SettingView

T = TypeVar("T")
Verdict = Literal["ok", "warn", "bad"]
_METRICS_OF = {"inferred": (), "nvml": (), "processes": ("sm_active",)}  # by source; the others provide all metrics
TIMEOUT_S = 2.0  # of a request that no check depends on


class Finding(msgspec.Struct, frozen=True):
    check: str
    verdict: Verdict
    text: str
    hint: str = ""
    limitation: str = ""  # what the server cannot do, and the consequence, in one line; `carma up` prints it


class Found(msgspec.Struct, frozen=True):
    """The GPUs that tasks can use, the problems of the other GPUs, or the error if there are none."""

    gpus: tuple[Gpu, ...] = ()
    problems: tuple[str, ...] = ()
    dcgm_problem: str = ""  # why DCGM provides no activity to a GPU that needs it
    error: NoGpus | None = None


class DoctorFacts:
    """Reads a fact when a check first needs it. One object for each run of `carma doctor`."""

    @cached_property
    def server(self) -> ServerView | None:
        """The daemon that serves this user; None if no daemon answers."""
        return _ask(Client.server, None)

    @property
    def foreign_server(self) -> ServerView | None:
        """The daemon, if it belongs to another user: this user then cannot write its files."""
        server = self.server
        return server if server is not None and os.geteuid() not in (0, server.uid) else None

    @property
    def runs_as_root(self) -> bool:
        """Whether the daemon runs as root, or would if this user started it now."""
        return (os.geteuid() if self.server is None else self.server.uid) == 0

    @cached_property
    def virtual(self) -> int:
        """Number of virtual GPUs of the daemon; 0 without a daemon and for real GPUs."""
        gpus: list[GpuView] = _ask(Client.gpus, [])
        return _virtual(gpus)

    @cached_property
    def machine(self) -> card_modes.MachineFacts | None:
        """None if no driver answers; `found` has the reason."""
        try:
            return card_modes.machine_facts(nvml.load_nvml())
        except NoGpus:
            return None

    @property
    def cards(self) -> tuple[card_modes.CardFacts, ...]:
        """The cards that answer."""
        return () if self.machine is None else tuple(card for card in self.machine.cards if not card.fault)

    @cached_property
    def found(self) -> Found:
        try:
            sampler = nvml.open_nvml(measured=self.setting("monitor.sm_activity", "auto") == "auto")
        except NoGpus as error:
            return Found(error=error)
        try:
            return Found(sampler.gpus(), sampler.problems(), sampler.activity_problem() or "")
        finally:
            sampler.close()

    @cached_property
    def running_settings(self) -> dict[str, SettingView]:
        """The settings of the daemon; empty if no daemon answers."""
        settings: list[SettingView] = _ask(Client.settings, [])
        return {line.name: line for line in settings}

    @cached_property
    def next_settings(self) -> dict[str, Any]:
        """The settings that a daemon started now would have; empty if they cannot be read."""
        try:
            loaded = load_settings(find_paths(os.environ), os.environ)
        except CarmaError:  # the check of the settings reports it
            return {}
        lines = {line.name: line.value for line in describe(*loaded)}
        plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(lines))  # as the values of the API
        return plain

    def setting(self, name: str, default: Any) -> Any:
        """The value in the running daemon; without a daemon, the value for the next one."""
        if self.running_settings:
            line = self.running_settings.get(name)
            return default if line is None else line.value
        return self.next_settings.get(name, default)


def _ask(question: Callable[[Client], T], otherwise: T) -> T:
    """`otherwise` if no daemon answers."""
    try:
        return ask(question, TIMEOUT_S)
    except CarmaError:
        return otherwise


def _virtual(gpus: list[GpuView]) -> int:
    return len(gpus) if all(gpu.kind == "virtual" for gpu in gpus) else 0


class ServerFacts(DoctorFacts):
    """The facts that the daemon reports; no driver library is opened."""

    def __init__(self, client: Client) -> None:
        views = client.gpus()
        self.server = client.server()
        self.running_settings = {line.name: line for line in client.settings()}
        self.virtual = _virtual(views)
        self.machine = None if self.virtual else card_modes.MachineFacts()
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
