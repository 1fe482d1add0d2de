"""When to recompute a step densely, to measure what sparse attention left out."""

from __future__ import annotations


class Audit:
    """Picks a share `rate` of steps, evenly spaced: no random state, the same in every run."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._owed = 0.0
        self._done = 0

    def next_turn(self, turns: int) -> int | None:
        """None if the next step is not audited, else whose turn it is: 0 .. turns - 1, one after the other."""
        self._owed += self.rate
        if self._owed < 1.0:
            return None
        self._owed -= 1.0
        self._done += 1
        return (self._done - 1) % turns
