"""The daemon's clock: what the machine's clock does must not matter."""

from __future__ import annotations

import pytest

from carma.daemon.runtime import SteadyClock


class FakeClocks:
    """A wall clock and a monotonic one that a test moves."""

    def __init__(self, wall: float = 1000.0) -> None:
        self.wall_at = wall
        self.monotonic_s = 50.0

    def clock(self, speed: float = 1.0, not_before: float = 0.0) -> SteadyClock:
        return SteadyClock(speed, not_before=not_before, wall=lambda: self.wall_at, monotonic=lambda: self.monotonic_s)


def test_it_starts_at_the_wall_and_follows_the_monotonic_clock() -> None:
    fake = FakeClocks()
    clock = fake.clock()
    fake.monotonic_s += 2.5
    assert clock.now() == 1002.5


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
def test_a_wall_clock_that_jumps_moves_nothing(jump_s: float) -> None:
    fake = FakeClocks()
    clock = fake.clock()
    fake.wall_at += jump_s
    fake.monotonic_s += 1.0
    assert clock.now() == 1001.0


def test_a_restart_with_an_older_wall_clock_goes_on_from_the_last_event() -> None:
    assert FakeClocks(wall=1000.0).clock(not_before=5000.0).now() == 5000.0
    assert FakeClocks(wall=9000.0).clock(not_before=5000.0).now() == 9000.0


def test_a_clock_that_is_ahead_goes_at_half_speed_until_the_wall_clock_has_caught_up() -> None:
    fake = FakeClocks(wall=1000.0)
    clock = fake.clock(not_before=1100.0)
    assert clock.ahead_s == 100.0
    times = []
    for _ in range(3):
        fake.monotonic_s += 100.0
        times.append(clock.now())
    assert times == [1150.0, 1200.0, 1300.0], "level with the wall clock after 200 s, and from then on"


def test_on_virtual_gpus_time_goes_on_at_their_speed() -> None:
    fake = FakeClocks(wall=1000.0)
    clock = fake.clock(speed=20.0, not_before=1100.0)
    fake.monotonic_s += 1.0
    assert clock.now() == 1120.0


def test_speed_makes_time_pass_faster() -> None:
    fake = FakeClocks()
    clock = fake.clock(speed=20.0)
    fake.monotonic_s += 3.0
    assert clock.now() == 1060.0


def test_the_real_one_does_not_go_back() -> None:
    clock = SteadyClock()
    times = [clock.now() for _ in range(1000)]
    assert times == sorted(times)
