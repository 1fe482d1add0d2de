"""When to recompute a step densely, to measure what sparse attention left out."""

from __future__ import annotations


class Audit:
    """Says for a share `rate` of steps that they are due, evenly spaced: no random state, the same in every run."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._owed = 0.0

    def due(self) -> bool:
        self._owed += self.rate
        if self._owed < 1.0:
            return False
        self._owed -= 1.0
        return True
