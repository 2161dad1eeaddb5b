"""How many decode steps a launch takes: as many as pass in LAUNCH_S, by the clock of the launches before it.

More steps a launch leave the host more time; but a request that comes meanwhile waits for the launch to end, and text
arrives in larger pieces. A step that the host holds up looks long at first: the next launch of several shows its true
length. Knows neither rows nor pages.
"""

LAUNCH_S = 0.016  # about a display's frame: nobody sees text come in pieces of that
_WEIGHT = 0.25  # of the newest launch in the running mean


class Pace:
    """`steps` for the next launch, between 1 and `most`."""

    def __init__(self, most: int):
        self.most = most
        self._step_s: float | None = None

    @property
    def steps(self) -> int:
        if self.most == 1 or self._step_s is None:
            return 1
        return max(1, min(self.most, int(LAUNCH_S / self._step_s)))

    def took(self, steps: int, seconds: float) -> None:
        """A launch of `steps` ended `seconds` after the one before it, which it had waited for."""
        each = seconds / steps
        before = each if self._step_s is None else self._step_s
        self._step_s = before + _WEIGHT * (each - before)
