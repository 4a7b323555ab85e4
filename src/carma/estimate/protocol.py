"""What an estimator plugin is: a function `make(context) -> Estimator`, registered under `carma.estimators`.

The estimator itself has one method, `estimate(request)`, and answers with an Estimate or a NoEstimate (a refusal is a
good answer). It may take seconds: it is called in a thread of its own, never in the daemon's loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from carma.core.model import Gpu
from carma.core.ports import Archive, Estimator
from carma.core.settings import Rules


@dataclass(frozen=True)
class Context:
    """What a factory may use: past runs, the server's GPUs, and the rules in force."""

    archive: Archive
    gpus: tuple[Gpu, ...]
    rules: Rules


Make = Callable[[Context], Estimator]
