"""Eviction policies: which slots of a layer's hot pool make room. One class a policy, found by name in `POLICIES`.

A policy only ranks. What must not go (held, dirty, in transfer) the pool leaves out of `allowed`, for every policy
alike. How to add one: docs/tiers.md.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


class EvictionPolicy(ABC):
    """Ranks the `num_slots` slots of one layer. All arrays of slots are distinct int64; calls come one at a time.

    Every method is a few array operations, whatever the number of slots.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots

    @abstractmethod
    def admit(self, slots: Ints) -> None:
        """`slots` hold new pages; what they held before is forgotten."""

    @abstractmethod
    def use(self, slots: Ints) -> None:
        """A step reads the pages in `slots`."""

    def weigh(self, slots: Ints, mass: Floats) -> None:  # noqa: B027  # most policies don't look at it
        """The pages in `slots` got `mass` `[n]` of a step's softmax (any scale, the same for all)."""

    @abstractmethod
    def victims(self, count: int, allowed: npt.NDArray[np.bool_]) -> Ints:
        """`min(count, allowed.sum())` distinct slots with `allowed[slot]`, the least valuable first."""


def _least(values: np.ndarray, count: int, allowed: npt.NDArray[np.bool_]) -> Ints:
    """The allowed slots with the `count` least values, ascending."""
    found = np.flatnonzero(allowed)
    if count < len(found):
        found = found[np.argpartition(values[found], count)[:count]]
    return found[np.argsort(values[found], kind="stable")]


class Lru(EvictionPolicy):
    """The longest unused first."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self._used = np.zeros(num_slots, np.int64)
        self._now = 0

    def admit(self, slots: Ints) -> None:
        self.use(slots)

    def use(self, slots: Ints) -> None:
        self._now += 1
        self._used[slots] = self._now

    def victims(self, count: int, allowed: npt.NDArray[np.bool_]) -> Ints:
        return _least(self._used, count, allowed)


class Clock(EvictionPolicy):
    """Second chance: a hand goes round, spares what was used since its last visit, and takes the rest (Corbató 1968).

    A page that is only fetched and never used goes at the first visit, so a scan doesn't push out what is in use.
    """

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self._referenced = np.zeros(num_slots, bool)
        self._hand = 0

    def admit(self, slots: Ints) -> None:
        self._referenced[slots] = False

    def use(self, slots: Ints) -> None:
        self._referenced[slots] = True

    def victims(self, count: int, allowed: npt.NDArray[np.bool_]) -> Ints:
        found = np.flatnonzero(allowed)
        order = np.roll(found, -int(np.searchsorted(found, self._hand)))
        if not len(order) or not count:
            return order[:0]
        spared = self._referenced[order]
        cold = np.flatnonzero(~spared)
        if len(cold) >= count:
            chosen = cold[:count]
            passed = order[: chosen[-1]]
        else:  # a whole round, then on with those whose chance is gone
            chosen = np.concatenate((cold, np.flatnonzero(spared)[: count - len(cold)]))
            passed = order
        self._referenced[passed] = False
        self._hand = (int(order[chosen[-1]]) + 1) % self.num_slots
        return order[chosen]


class Attention(EvictionPolicy):
    """The least recent attention mass first: a sum over steps in which each counts `decay` times the next.

    A page that nobody has weighed yet counts as the median of those that were, so that it gets its chance. In the
    spirit of H2O's accumulated attention (arXiv:2306.14048), with decay, by page, and nothing is lost by an eviction.
    """

    def __init__(self, num_slots: int, decay: float = 0.9) -> None:
        super().__init__(num_slots)
        self._growth = 1 / decay  # instead of shrinking all masses at every step the newest count for more
        self._unit = 1.0
        self._mass = np.zeros(num_slots)

    def admit(self, slots: Ints) -> None:
        weighed = self._mass[self._mass > 0]
        self._mass[slots] = np.median(weighed) if len(weighed) else self._unit

    def use(self, slots: Ints) -> None:
        pass

    def weigh(self, slots: Ints, mass: Floats) -> None:
        self._unit *= self._growth
        if self._unit > 1e100:
            self._mass /= self._unit
            self._unit = 1.0
        self._mass[slots] += mass.astype(np.float64) * self._unit

    def victims(self, count: int, allowed: npt.NDArray[np.bool_]) -> Ints:
        return _least(self._mass, count, allowed)


POLICIES: dict[str, type[EvictionPolicy]] = {"lru": Lru, "clock": Clock, "attention": Attention}


def make_policy(name: str, num_slots: int) -> EvictionPolicy:
    """The policy `name` for a layer of `num_slots` slots. Raises ValueError with the names there are."""
    if name not in POLICIES:
        close = difflib.get_close_matches(name, POLICIES, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"eviction policy {name!r}: use one of {', '.join(POLICIES)}{hint}")
    return POLICIES[name](num_slots)
