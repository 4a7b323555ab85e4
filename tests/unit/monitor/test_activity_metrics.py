"""A metric of activity has one list (`Activity`) and one name per source and in the command line."""

from __future__ import annotations

from carma.cli.wording import ACTIVITY_NAMES
from carma.core.model.values import ACTIVITY_METRICS
from carma.monitor.dcgm import FIELDS
from carma.trial.inside.carma_measure.gpu_counters import GPM_METRICS


def test_every_metric_has_a_dcgm_field_a_gpm_metric_and_a_name_for_users() -> None:
    for names in (FIELDS.values(), GPM_METRICS, ACTIVITY_NAMES):
        assert set(names) == set(ACTIVITY_METRICS)
