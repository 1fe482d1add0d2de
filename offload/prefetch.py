"""Asks for a layer's pages before the layer runs: those that it chose at the last step, while earlier layers compute.

Sparse decoding chooses nearly the same pages step after step, so the last choice is the forecast of the next. Behind
the last layer the pipeline goes on with the first ones, whose next step is the following token. A forecast only moves
bytes early: what a layer reads is what `HotPool.ensure` has fetched, forecast or not.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import numpy.typing as npt

from .hot_pool import WHOLE, HotPool
from .tiers import Ints
from .transfers import Fetch


class LayerPipeline:
    """Keeps the fetches of up to `ahead` layers before the one that computes.

    A step is `begin_step`, then for each layer in order `before_layer`, and `chosen` when its pages are known. The
    compute thread calls; no call waits.
    """

    def __init__(self, pool: HotPool, num_layers: int, ahead: int = 2, parts: int = WHOLE) -> None:
        if not 0 <= ahead < max(num_layers, 1):
            raise ValueError(f"prefetch: {ahead} layers ahead of {num_layers}: must be from 0 to less than all")
        self._pool, self._num_layers, self._ahead, self._parts = pool, num_layers, ahead, parts
        self._batch: Hashable = None
        self._last: list[Ints | None] = [None] * num_layers
        self._running: list[list[Fetch]] = [[] for _ in range(num_layers)]
        self._asked = np.zeros(num_layers, bool)

    def begin_step(self, batch: Hashable) -> None:
        """`batch` identifies who is in it (the rows' first blocks, say), not how long they are: when it changes, what
        was forecast for the old one is cancelled."""
        if batch != self._batch:
            self._batch = batch
            self.cancel()

    def before_layer(self, layer: int) -> None:
        """`layer` is about to run: asks for the pages of the layers after it, the nearest first."""
        self._running[layer] = []
        self._asked[layer] = False
        for step in range(1, self._ahead + 1):
            after = (layer + step) % self._num_layers
            blocks = self._last[after]
            if blocks is not None and not self._asked[after]:
                self._asked[after] = True
                if not self._pool.has(after, blocks):  # what nearly every step finds
                    self._running[after] = self._pool.prefetch(after, blocks, self._parts)

    def chosen(self, layer: int, blocks: npt.ArrayLike) -> None:
        """`layer` read these blocks at this step, those that it had to fetch first: of more than a wave the first are
        asked for again, as the others are likely still there."""
        self._last[layer] = np.asarray(blocks, np.int64)[: self._pool.wave].copy()

    def cancel(self) -> None:
        """Forgets all forecasts and takes back what wasn't begun."""
        for layer in range(self._num_layers):
            self._pool.cancel(self._running[layer])
            self._running[layer], self._last[layer] = [], None
        self._asked[:] = False
