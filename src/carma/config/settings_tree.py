"""All settings: the core's rules under their own names, and those of the daemon around it.

A field's sentence (Meta description) is what `carma config show` and the reference page print. Names end in the unit:
`_mib` also takes sizes such as 12GiB, `_s` also takes durations such as 90s.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from carma.core.model.settings import Rules
from carma.core.model.values import Record


class Monitor(Record, frozen=True, kw_only=True):
    period_s: Annotated[float, Meta(ge=0.05, le=60.0, description="Between two looks at the GPUs, in seconds.")] = 1.0


class Daemon(Record, frozen=True, kw_only=True):
    admins: Annotated[
        tuple[str, ...],
        Meta(description="Users who may act on all tasks and drain GPUs; root and the daemon's user always may."),
    ] = ()
    max_request_mib: Annotated[
        int, Meta(ge=1, le=1024, description="The largest request that is accepted, in MiB.")
    ] = 8
    keep_logs_days: Annotated[
        float,
        Meta(ge=0.0, description="Finished tasks and their logs are removed after so many days; 0: they are kept."),
    ] = 90.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="How much the daemon's own log says.")
    ] = "info"


class Virtual(Record, frozen=True, kw_only=True):
    """Made-up GPUs, on which real processes run."""

    gpus: Annotated[
        int, Meta(ge=0, le=1024, description="So many virtual GPUs instead of the machine's; 0: the machine's own.")
    ] = 0
    gpu_memory_mib: Annotated[int, Meta(ge=1, le=1 << 24, description="Memory of each virtual GPU, in MiB.")] = 40_960
    speed: Annotated[
        float, Meta(gt=0.0, le=100_000.0, description="How many times faster than real time virtual GPUs run.")
    ] = 1.0


class Launch(Record, frozen=True, kw_only=True):
    run_as_submitter: Annotated[
        Literal["auto", "yes", "no"],
        Meta(description="Whether tasks run as the user who submitted them; auto: yes when the daemon is root."),
    ] = "auto"
    start_timeout_s: Annotated[
        float,
        Meta(
            ge=1.0,
            le=86_400.0,
            description="Time for a task to start, in s: entering its directory, opening its output, executing the "
            "program. A task that needs longer ends as launch_failed.",
        ),
    ] = 60.0
    max_output_mib: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 20,
            description="Size limit for stdout and for stderr of an attempt, each, in MiB; the end is kept. 0: no "
            "limit. Files named with --output are not limited.",
        ),
    ] = 256


class Settings(Rules, frozen=True, kw_only=True):
    """The rules' sections are inherited: a rule that is added to the core is a setting at once."""

    monitor: Monitor = Monitor()
    daemon: Daemon = Daemon()
    virtual: Virtual = Virtual()
    launch: Launch = Launch()

    @property
    def rules(self) -> Rules:
        """The part that decisions follow, as the core's state holds it."""
        return Rules(**{name: getattr(self, name) for name in Rules.__struct_fields__})
