"""A row of a trace means the same to a replay on virtual GPUs as to the simulator."""

from __future__ import annotations

import pytest

from carma.demo.replay import command_of
from carma.traces import SHIPPED, find
from carma.vgpu import virtual_task as vgpu
from carma_lab.simulator.simulated_server import plan_of
from lab_fixtures.small_simulations import row, simulation


@pytest.mark.parametrize("name", SHIPPED)
def test_start_up_is_a_part_of_the_run(name: str) -> None:
    for each in find(name).tasks:
        options = vgpu._parser().parse_args(command_of(each)[3:])
        assert options.start_s > 0.0
        assert options.start_s + options.seconds == pytest.approx(each.seconds)
        assert options.seconds == pytest.approx(plan_of(each)[0][0])


def test_alone_both_take_as_long() -> None:
    each = row(seconds=600.0, start_s=100.0)
    options = vgpu._parser().parse_args(command_of(each)[3:])
    made = simulation(each)
    made.run()
    assert made.runs[0].ran_s == pytest.approx(options.start_s + options.seconds)


def test_what_a_task_wants_of_a_gpu_is_the_same() -> None:
    for each in (row(), row(gpus=2, busy_gpus=1, gr_active=0.9, power=0.7)):
        options = vgpu._parser().parse_args(command_of(each)[3:])
        told = (options.sm, options.occupancy, options.dram, options.engine, options.power)
        assert told == (each.sm_active, each.sm_occupancy, each.dram_active, each.gr_active, each.power)
        assert options.busy_gpus == each.busy_gpus
