"""A launch takes as many steps as fit its time, and never more than it may."""

import pytest

from onechip.engine.pace import LAUNCH_S, Pace


def test_the_first_launch_takes_one_step():
    assert Pace(8).steps == 1


@pytest.mark.parametrize(
    ("step_s", "steps"), [(LAUNCH_S * 5, 1), (LAUNCH_S / 3.5, 3), (LAUNCH_S / 1000, 8)]
)
def test_a_launch_fills_its_time(step_s: float, steps: int):
    pace = Pace(8)
    for _ in range(40):
        pace.took(pace.steps, step_s * pace.steps)
    assert pace.steps == steps


def test_a_host_slower_than_the_device_leads_to_longer_launches():
    """With one step a launch the host is the limit; what a launch of several takes shows the device's time."""
    host_s, device_s, pace = 0.004, 0.001, Pace(8)
    for _ in range(40):
        pace.took(pace.steps, max(host_s, device_s * pace.steps))
    assert pace.steps == 8


def test_one_step_a_launch_is_kept():
    pace = Pace(1)
    pace.took(1, 1e-6)
    assert pace.steps == 1
