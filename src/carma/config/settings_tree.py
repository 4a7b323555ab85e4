"""All settings: the rules of the core, and the settings of the daemon.

`carma config show --verbose` and the reference print the description of a field. Names end with the unit: `_mib` also
takes sizes such as 12GiB, `_s` also takes durations such as 90s.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from carma.core.model.settings import Rules
from carma.core.model.values import Record


class Monitor(Record, frozen=True, kw_only=True):
    period_s: Annotated[
        float, Meta(ge=0.05, le=60.0, description="Interval between samples of the GPUs, in seconds.")
    ] = 1.0
    sm_activity: Annotated[
        Literal["auto", "inferred"],
        Meta(
            description="Source of SM activity. auto: the best one of each GPU: GPM, DCGM, or inference from power and "
            "engine utilisation. inferred: inference on every GPU, as if it had neither GPM nor DCGM."
        ),
    ] = "auto"


class Daemon(Record, frozen=True, kw_only=True):
    admins: Annotated[
        tuple[str, ...],
        Meta(description="Users who may act on all tasks and drain GPUs, in addition to root and the daemon's user."),
    ] = ()
    max_request_mib: Annotated[int, Meta(ge=1, le=1024, description="Maximum size of a request, in MiB.")] = 8
    keep_logs_days: Annotated[
        float,
        Meta(ge=0.0, description="Days after which finished tasks and their logs are removed; 0: never."),
    ] = 90.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Lowest level of messages in the daemon's log.")
    ] = "info"


class Virtual(Record, frozen=True, kw_only=True):
    """Virtual GPUs, on which real processes run."""

    gpus: Annotated[int, Meta(ge=0, le=1024, description="Number of virtual GPUs; 0: the GPUs of the machine.")] = 0
    gpu_memory_mib: Annotated[int, Meta(ge=1, le=1 << 24, description="Memory of each virtual GPU, in MiB.")] = 40_960
    speed: Annotated[
        float, Meta(gt=0.0, le=100_000.0, description="Speed of virtual GPUs, as a multiple of real time.")
    ] = 1.0


class Launch(Record, frozen=True, kw_only=True):
    run_as_submitter: Annotated[
        Literal["auto", "yes", "no"],
        Meta(description="Run tasks as their submitters; auto: yes if the daemon runs as root."),
    ] = "auto"
    start_timeout_s: Annotated[
        float,
        Meta(
            ge=1.0,
            le=86_400.0,
            description="Time for a task to enter its directory, open its output and execute its "
            "program, in seconds. A task that needs longer ends as launch_failed.",
        ),
    ] = 60.0
    max_output_mib: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 20,
            description="Size limit of stdout and of stderr of an attempt, in MiB each; the end is "
            "kept. 0: no limit. Files named with --output have no limit.",
        ),
    ] = 256
    progress: Annotated[
        bool,
        Meta(description="Count the optimizer steps of PyTorch tasks, with an import hook in their Python processes."),
    ] = True
    tracker_tags: Annotated[
        bool,
        Meta(description="Set variables from which MLflow and W&B tag runs with task, attempt, GPUs and booking."),
    ] = True


class Metrics(Record, frozen=True, kw_only=True):
    """The endpoint for Prometheus."""

    listen: Annotated[
        str, Meta(description="Loopback address and port of the endpoint, such as 127.0.0.1:9177; empty: none.")
    ] = ""
    token_file: Annotated[
        str,
        Meta(description="File with the token that a request must have (Authorization: Bearer TOKEN); empty: none."),
    ] = ""


class Settings(Rules, frozen=True, kw_only=True):
    """The sections of the rules are inherited: each rule of the core is a setting."""

    monitor: Monitor = Monitor()
    daemon: Daemon = Daemon()
    virtual: Virtual = Virtual()
    launch: Launch = Launch()
    metrics: Metrics = Metrics()
    plugins: dict[str, Record] = {}  # policy -> its own settings, where any are given; not a section

    @property
    def rules(self) -> Rules:
        """The rules of the core, which are part of its state."""
        return Rules(**{name: getattr(self, name) for name in Rules.__struct_fields__})
