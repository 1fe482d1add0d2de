"""A hot pool against a plain dict: random operations, faults among them, every byte checked.

The oracle knows which version of which page was committed last. A read gives exactly that, or a fault that the injected
ones explain; nothing else.
"""

import numpy as np
import torch

from tests.offload.cases import content
from tests.offload.faulty import FaultyTier
from vllm_ktx.offload import SCORING, HotPool, PageMissing, PageSpec, PoolFull, Tier, TieredStore, TierFault


class PoolModel:
    """`slots` a layer above `store`; `rng` decides what happens."""

    def __init__(
        self, spec: PageSpec, store: Tier, slots: int, policy: str, rng: np.random.Generator, faults: bool
    ) -> None:
        self.spec, self.inner, self.rng, self.faults = spec, store, rng, faults
        self.store = FaultyTier(store)
        width = spec.page_bytes + 64
        self.memory = [torch.zeros(slots, width, dtype=torch.uint8) for _ in range(spec.num_layers)]
        self.pool = HotPool(
            spec, self.memory, self.store, policy, dirty_share=float(rng.choice([0.0, 0.3, 0.8])), timeout=30.0,
            queue_pages=int(rng.choice([5, 1000])), bounce=bool(rng.integers(2)),
        )  # fmt: skip
        self.truth: dict[tuple[int, int], int] = {}
        self.maybe_lost: set[tuple[int, int]] = set()  # its only copy was in the pool while its writes failed
        self.tickets: list = []
        self.version = 0
        self.reads = self.read_faults = 0

    def step(self) -> None:
        """One random operation."""
        operations = [self.seal] * 8 + [self.read] * 12 + [self.prefetch] * 8
        operations += [self.cancel, self.forget, self.weigh, self.forget_then_read]
        if self.faults:
            operations += [self.inject, self.heal] * 2
        operations[self.rng.integers(len(operations))]()

    def blocks(self, most: int) -> np.ndarray:
        count = int(self.rng.integers(1, min(most, self.spec.num_blocks) + 1))
        return self.rng.choice(self.spec.num_blocks, count, replace=False)

    def known(self, layer: int, most: int) -> np.ndarray:
        """Blocks that the layer should have, most of the time."""
        blocks = [block for at, block in self.truth if at == layer]
        if not blocks or self.rng.random() < 0.1:
            return self.blocks(most)
        return self.rng.choice(blocks, min(int(self.rng.integers(1, most + 1)), len(blocks)), replace=False)

    def layer(self) -> int:
        return int(self.rng.integers(self.spec.num_layers))

    def seal(self) -> None:
        layer, blocks = self.layer(), self.blocks(self.pool.wave)
        for block in blocks.tolist():  # whatever comes of it, the old content is void
            self.truth.pop((layer, block), None)
            self.maybe_lost.discard((layer, block))
        try:
            slots = self.pool.allocate(layer, blocks)
        except PoolFull:
            assert self.store.bad_writes, "slots ran out although everything can be written"
            return
        self.version += 1
        data = content(self.spec, self.spec.pages(layer, blocks), self.version)
        self.memory[layer][torch.from_numpy(slots).long(), : self.spec.page_bytes] = torch.from_numpy(data)
        self.pool.commit(layer, blocks)
        self.pool.release(layer)
        for block in blocks.tolist():
            self.truth[layer, block] = self.version
        self.note_unwritable()

    def read(self) -> None:
        layer = self.layer()
        blocks = self.known(layer, self.pool.wave)
        parts = int(self.rng.choice([SCORING, 3]))
        try:
            slots = self.pool.ensure(layer, blocks, parts)
        except TierFault as fault:
            self.explain(layer, blocks, fault)
            self.pool.release(layer)
            return
        except PoolFull:
            assert self.store.bad_writes, "slots ran out although everything can be written"
            return
        self.reads += len(blocks)
        width = self.spec.page_bytes if parts == 3 else self.spec.scoring_bytes or self.spec.page_bytes
        assert len(set(slots.tolist())) == len(blocks)
        assert (self.pool.slot_table(layer).numpy()[blocks] == slots).all()
        for block, slot in zip(blocks.tolist(), slots.tolist(), strict=True):
            want = content(self.spec, self.spec.pages(layer, [block]), self.truth[layer, block])[0, :width]
            assert (self.memory[layer][slot].numpy()[:width] == want).all(), f"block {block}, layer {layer}"
        if self.rng.random() < 0.8:
            self.pool.release(layer)
        else:
            self.read_more(layer)

    def read_more(self, layer: int) -> None:
        """A second wave while the first is held."""
        try:
            self.pool.ensure(layer, self.known(layer, self.pool.wave))
        except (TierFault, PoolFull):
            pass  # unknown pages, faults, or two waves
        self.pool.release(layer)

    def explain(self, layer: int, blocks: np.ndarray, fault: TierFault) -> None:
        for position, why in fault.faults.items():
            page = (layer, int(blocks[position]))
            assert (why.layer, why.block) == page
            if isinstance(why, PageMissing):
                assert page not in self.truth or page in self.maybe_lost, why
            else:
                assert int(self.spec.pages(*page)[0]) in self.store.bad_reads, why
            self.read_faults += 1

    def prefetch(self) -> None:
        layer = self.layer()
        blocks = self.known(layer, 2 * self.pool.wave)
        self.tickets += self.pool.prefetch(layer, blocks, int(self.rng.choice([SCORING, 3])))

    def cancel(self) -> None:
        self.pool.cancel(self.tickets)
        self.tickets.clear()

    def forget(self) -> None:
        blocks = self.blocks(3)
        self.pool.forget(blocks)
        for layer in range(self.spec.num_layers):
            for block in blocks.tolist():
                self.truth.pop((layer, block), None)
                self.maybe_lost.discard((layer, block))

    def forget_then_read(self) -> None:
        """What was forgotten is missing at once, even if it was on its way."""
        layer, block = self.layer(), self.blocks(1)
        self.pool.prefetch(layer, block)
        self.pool.forget(block)
        for at in range(self.spec.num_layers):
            self.truth.pop((at, int(block[0])), None)
            self.maybe_lost.discard((at, int(block[0])))
        assert self.pool.slot_table(layer)[int(block[0])] < 0 and not self.stored((layer, int(block[0])))
        try:
            self.pool.ensure(layer, block)
            raise AssertionError("a forgotten page was read")
        except TierFault as fault:
            assert isinstance(fault.faults[0], PageMissing)

    def weigh(self) -> None:
        blocks = self.blocks(8)
        self.pool.weigh(self.layer(), blocks, self.rng.random(len(blocks), dtype=np.float32))

    def inject(self) -> None:
        pages = set(self.rng.choice(self.spec.num_pages, 10, replace=False).tolist())
        if self.rng.integers(2):
            self.store.bad_reads = pages
        else:
            self.store.bad_writes = pages
            self.note_unwritable()

    def note_unwritable(self) -> None:
        bad = {self.spec.name(page) for page in self.store.bad_writes}
        self.maybe_lost |= {page for page in bad & set(self.truth) if not self.stored(page)}

    def heal(self) -> None:
        self.store.bad_reads, self.store.bad_writes = set(), set()
        self.maybe_lost = {page for page in self.maybe_lost if not self.stored(page)}

    def stored(self, page: tuple[int, int]) -> bool:
        with self.pool._lock:
            return bool(self.pool._table.stored[page])

    def finish(self) -> None:
        """Everything that is left is right, in the pool and, after a flush, in the store."""
        self.heal()
        self.pool.check_integrity()
        try:
            self.pool.flush(30)
        except TierFault:
            assert self.maybe_lost
        self.pool.check_integrity()
        for (layer, block), version in self.truth.items():
            page = self.spec.pages(layer, [block])
            try:
                slot = self.pool.ensure(layer, [block])[0]
            except TierFault:
                assert (layer, block) in self.maybe_lost
                continue
            self.pool.release(layer)
            assert (
                self.memory[layer][int(slot)].numpy()[: self.spec.page_bytes] == content(self.spec, page, version)
            ).all()
        self.pool.close()
        self.pool.check_integrity()
        if isinstance(self.inner, TieredStore):
            self.inner.check_integrity()
        self.store.close()
