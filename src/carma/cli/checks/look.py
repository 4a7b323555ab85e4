"""What the checks of `carma doctor` look at, each thing once: the machine, the daemon, the settings that hold."""

from __future__ import annotations

import os
from functools import cached_property
from typing import Any, Literal

import msgspec

from carma.core.model import Gpu
from carma.errors import CarmaError, NoGpus
from carma.monitor.facts import MachineFacts
from carma.wire.types import ServerView

Verdict = Literal["ok", "warn", "bad"]
ANSWER_S = 2.0  # for a daemon that is asked by the way


class Finding(msgspec.Struct, frozen=True):
    check: str
    verdict: Verdict
    text: str
    hint: str = ""


class Found(msgspec.Struct, frozen=True):
    """The GPUs that tasks can use, sentences about those they cannot, or why there are none."""

    gpus: tuple[Gpu, ...] = ()
    problems: tuple[str, ...] = ()
    dcgm_problem: str = ""  # why DCGM does not give activity, where a GPU would need it
    error: NoGpus | None = None


class Look:
    """Everything is asked for when it is first needed. Made anew for each run of the doctor."""

    @cached_property
    def elsewhere(self) -> ServerView | None:
        """The daemon that serves this user, where it is another's: what it keeps is then not the user's to write."""
        from carma.cli.connect import connect

        try:
            with connect(ANSWER_S) as client:
                server = client.server()
        except CarmaError:
            return None
        return server if os.geteuid() not in (0, server.uid) else None

    @cached_property
    def virtual(self) -> int:
        """How many virtual GPUs the daemon has; 0 when there is no daemon, or when it has real ones."""
        from carma.cli.connect import connect

        try:
            with connect(ANSWER_S) as client:
                found = client.gpus()
        except CarmaError:
            return 0
        return len(found) if all(gpu.kind == "virtual" for gpu in found) else 0

    @cached_property
    def machine(self) -> MachineFacts | None:
        """None where no driver answers; `found` says why."""
        from carma.monitor import facts

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
    def _settings(self) -> dict[str, Any]:
        """Those of the daemon that answers, else those that one would start with; none where they cannot be read."""
        from carma.cli.connect import connect
        from carma.config import describe, load_settings
        from carma.paths import find_paths

        try:
            with connect(ANSWER_S) as client:
                if told := {line.name: line.value for line in client.settings()}:
                    return told
        except CarmaError:
            pass
        try:
            loaded = load_settings(find_paths(os.environ), os.environ)
        except CarmaError:  # the check of the settings says what is wrong with them
            return {}
        return {line.name: line.value for line in describe(loaded.settings, loaded.origins)}

    def setting(self, name: str, default: Any) -> Any:
        return self._settings.get(name, default)
