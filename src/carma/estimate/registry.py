"""Makes the estimators that the settings name (`[memory] sources`), in that order."""

from __future__ import annotations

from carma.core.ports import Estimator
from carma.errors import CarmaError, PluginError
from carma.plugins import ESTIMATORS, load_one
from carma.trial.protocol import Context


def make_estimators(context: Context) -> tuple[Estimator, ...]:
    """All of `context.rules.memory.sources`. A name that does not exist, or a factory that raises, stops the start:
    a source that is silently missing would change every decision."""
    return tuple(make_estimator(name, context) for name in context.rules.memory.sources)


def make_estimator(name: str, context: Context) -> Estimator:
    """One by its name, whether the settings name it or not."""
    factory = load_one(ESTIMATORS, name)
    if not callable(factory):
        raise PluginError(f"the estimator {name!r} is a {type(factory).__name__}, not a function of a Context")
    try:
        made = factory(context)
    except CarmaError:
        raise
    except Exception as error:
        raise PluginError(
            f"the estimator {name!r} cannot be made: {type(error).__name__}: {error}",
            "Take it out of sources in [memory], or correct what it complains about.",
        ) from error
    if not callable(getattr(made, "estimate", None)):
        raise PluginError(f"the estimator {name!r} made a {type(made).__name__}, which has no method `estimate`")
    estimator: Estimator = made
    return estimator
