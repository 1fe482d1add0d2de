"""A step planned on the host and carried out on a device that is never waited for.

What the plan says goes there in one copy; what the layers count there comes back when it has arrived. No tensor of the
device is read here, but in `Accounts.flush`, which no step calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .. import _compat
from ..metrics import AUDITED, SPARSE, STATS, audit_sums

ALIGNED = 16  # bytes: Triton compiles a kernel once more for pointers that aren't


def room(arrays: Sequence[npt.NDArray[Any]]) -> list[int]:
    """Bytes up to each of `arrays`, and to the end, as `send` lays them out."""
    return [0, *accumulate(-(-array.nbytes // ALIGNED) * ALIGNED for array in arrays)]


def send(
    arrays: Sequence[npt.NDArray[Any]], device: torch.device, lasting: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """`arrays`, 1-D, as tensors on `device`, by one copy that nobody waits for. `lasting`: uint8, where the first of
    them, as many as fit, are to lie."""
    starts = room(arrays)
    buffer = np.empty(starts.pop(), np.uint8)
    places = [slice(start, start + array.nbytes) for start, array in zip(starts, arrays, strict=True)]
    for place, array in zip(places, arrays, strict=True):
        buffer[place].view(array.dtype)[:] = array
    there = _compat.upload(buffer, device)
    kinds = (torch.from_numpy(array[:0]).dtype for array in arrays)
    kept = 0 if lasting is None else len(lasting)
    if lasting is not None:
        lasting.copy_(there[:kept])
    sources = (lasting if lasting is not None and place.stop <= kept else there for place in places)
    return [source[place].view(kind) for source, place, kind in zip(sources, places, kinds, strict=True)]


class DeviceSlots:
    """`OpenPages.slot_of` `[num_blocks]` on the device, kept up by what a step changes."""

    def __init__(self, num_blocks: int, device: torch.device) -> None:
        self.tensor = torch.full((num_blocks,), -1, dtype=torch.int32, device=device)
        self._there = np.full(num_blocks, -1, np.int32)

    def changes(self, slot_of: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """Blocks whose slot isn't yet what `slot_of` says, and the slots; to be sent, and handed to `apply`."""
        blocks = np.flatnonzero(slot_of != self._there).astype(np.int64)
        slots = self._there[blocks] = slot_of[blocks]
        return blocks, slots

    def apply(self, blocks: torch.Tensor, slots: torch.Tensor) -> None:
        """In stream order: the kernels of earlier steps still see their own map."""
        self.tensor.index_copy_(0, blocks, slots)


class Accounts:
    """What `layers` sparse layers left unread, counted on the device and handed to `STATS` every `EVERY` steps.

    Kernels write a step's figures for each layer, token and kv head; one reduction adds up all layers' when the next
    step begins. A copy of the sums goes to pinned memory and is read once its event has passed.
    """

    EVERY = 32

    def __init__(self, layers: Sequence[int], kv_heads: int, device: torch.device) -> None:
        self._row = {layer: i for i, layer in enumerate(sorted(layers))}
        self._kv_heads, self._device = kv_heads, device
        self._layers = torch.zeros(len(layers), len(SPARSE), dtype=torch.float64, device=device)
        self._audit = torch.zeros(len(AUDITED), dtype=torch.float64, device=device)
        self._step: tuple[torch.Tensor, ...] | None = None
        self._lasting: dict[int, tuple[torch.Tensor, ...]] = {}  # by tokens
        self._steps = 0
        self._host = torch.empty(
            self._layers.numel() + len(AUDITED), dtype=torch.float64, pin_memory=device.type == "cuda"
        )
        self._coming: Any = None  # the event of a copy on its way
        self._told = np.zeros(self._layers.numel() + len(AUDITED))

    def begin_step(self, context_pages: torch.Tensor | None, lasting: bool = False) -> None:
        """A step begins, in which token t could read `context_pages[t]` (int64 `[tokens]`) pages; None: all tokens read
        all of theirs. `lasting`: kernels write where they did in the last such step of so many tokens."""
        self._add_up()
        if self._steps >= self.EVERY and self._coming is None:
            self._fetch()
        elif self._coming is not None and self._coming.query():
            self._tell()
        if context_pages is not None:
            made = self._lasting_counts(len(context_pages)) if lasting else self._new_counts(len(context_pages))
            made[2].fill_(torch.iinfo(torch.int32).max)  # a layer that isn't called has read all
            self._step = *made, context_pages

    def _new_counts(self, tokens: int) -> tuple[torch.Tensor, ...]:
        shape, kinds = (len(self._row), tokens, self._kv_heads), (torch.float32, torch.float32, torch.int32)
        return tuple(torch.empty(shape, dtype=kind, device=self._device) for kind in kinds)

    def _lasting_counts(self, tokens: int) -> tuple[torch.Tensor, ...]:
        """Always the same for so many tokens; a part of what there is for more, if vLLM captured that first."""
        if tokens not in self._lasting:
            more = next((made for size, made in self._lasting.items() if size > tokens), None)
            self._lasting[tokens] = self._new_counts(tokens) if more is None else tuple(x[:, :tokens] for x in more)
        return self._lasting[tokens]

    def of_layer(self, layer: int) -> dict[str, torch.Tensor]:
        """Where a layer's kernels write: `dropped`, `depth` float32, `pages_read` int32, `[tokens, kv_heads]`."""
        assert self._step is not None
        dropped, depth, read = (part[self._row[layer]] for part in self._step[:3])
        return {"dropped": dropped, "depth": depth, "pages_read": read}

    def audit(self, *outputs: torch.Tensor) -> None:
        """A layer that was computed densely as well; arguments as of `metrics.audit_sums`."""
        rows, *sums = audit_sums(*outputs)
        self._audit += torch.stack([sums[0].new_full((), rows, dtype=torch.float64), *(x.double() for x in sums)])

    @torch.inference_mode()  # as vLLM's steps
    def flush(self) -> None:
        """Hands on all that was counted; waits for the device."""
        self._add_up()
        if self._coming is not None:
            self._coming.synchronize()
            self._tell()
        self._fetch()
        self._coming.synchronize()
        self._tell()

    def _add_up(self) -> None:
        if self._step is None:
            return
        dropped, depth, read, had = self._step
        self._step = None
        had = had[None, :, None].expand(read.shape)
        chose = read < had
        parts = [chose, *(torch.where(chose, x, 0) for x in (read, had)),
                 *(torch.where(chose, x, 0.0) for x in (dropped, depth))]  # fmt: skip
        self._layers += torch.stack([part.sum((1, 2), dtype=torch.float64) for part in parts], 1)
        self._steps += 1

    def _fetch(self) -> None:
        self._host.copy_(torch.cat((self._layers.flatten(), self._audit)), non_blocking=True)
        self._coming, self._steps = torch.cuda.Event() if self._host.is_pinned() else Passed(), 0
        self._coming.record()

    def _tell(self) -> None:
        told = self._host.numpy().copy()
        self._coming, new, self._told = None, told - self._told, told
        for layer, row in self._row.items():
            STATS.add_sparse(layer, *new[row * len(SPARSE) : (row + 1) * len(SPARSE)].tolist())
        STATS.add_audit(*new[-len(AUDITED) :].tolist())


class Passed:
    """The event of work on the CPU."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True
