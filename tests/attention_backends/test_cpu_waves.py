"""Kernels over pages that are not all resident: the same bits as with everything resident, whatever a wave holds."""

import numpy as np
import pytest
import torch

from tests.attention_backends.cases import GROUPS, make_batch, make_format
from vllm_ktx.attention_backends.cpu import native
from vllm_ktx.attention_backends.selection import SparseSettings

kernels = native.load()
if kernels is None:
    pytest.skip("the native CPU kernels are not built", allow_module_level=True)

ISAS = kernels.available_isas()
SMALL = {"window": 256, "sinks": 64, "min_pages": 2, "max_pages": 40}
MIXED = [(1, 4000), (3, 2100), (150, 1900), (1, 0), (64, 2560), (0, 700), (200, 0), (70, 64), (1, 3072)]


class Pool:
    """`limit` slots of garbage; a wave's pages are put into scattered ones of them and nowhere else. `planes`: the
    bytes that scoring reads are kept beside it."""

    def __init__(self, batch, limit, planes=False):
        self.limit, self.source = limit, batch.inputs["payload"]
        slots = batch.inputs["payload_slot"]
        self.home = torch.arange(len(batch.inputs["open_slot"])).int() if slots is None else slots
        self.open_slot, self.scoring_bytes = batch.inputs["open_slot"], batch.layout.scoring_bytes
        self.payload = torch.full((limit, self.source.shape[1]), 0xAB, dtype=torch.uint8)
        self.payload_slot = torch.full_like(self.open_slot, -1)
        self.waves, self.fetched, self.probed = 0, 0, 0
        self.scoring, self.slots, self.native = None, None, None
        if planes:
            self.scoring = torch.full((len(self.home), self.scoring_bytes + 64), 0xAB, dtype=torch.uint8)
            self.scoring[:, : self.scoring_bytes] = self.source[self.home.long(), : self.scoring_bytes]

    def fetch(self, blocks, scoring):
        wanted = torch.from_numpy(blocks).long()
        assert 0 < len(wanted) <= self.limit and len(wanted.unique()) == len(wanted)
        assert scoring or (self.open_slot[wanted] < 0).all(), "open pages are not paged"
        self.payload.fill_(0xAB)
        self.payload_slot.fill_(-1)
        slots = torch.randperm(self.limit)[: len(wanted)]
        self.payload_slot[wanted] = slots.int()
        end = self.scoring_bytes if scoring else self.source.shape[1]
        self.payload[slots, :end] = self.source[self.home[wanted].long(), :end]
        self.waves += 1
        self.fetched += len(wanted)
        self.probed += scoring


def run(batch, sparse, pool=None, threads=1):
    tokens, heads = len(batch.inputs["q"]), batch.layout.num_kv_heads
    extra = {}
    if sparse is not None:
        extra = {
            "headers": batch.headers,
            "sparse": sparse,
            "dropped": torch.full((tokens, heads), -1.0),
            "pages_read": torch.full((tokens, heads), -1, dtype=torch.int32),
            "chosen": torch.full((tokens, heads, 64), -1, dtype=torch.int32),
        }
    paged = {} if pool is None else {"residency": pool, "payload": pool.payload, "payload_slot": pool.payload_slot}
    out, lse = batch.run(kernels, num_threads=threads, **extra, **paged)
    return [out, lse, *(extra[name] for name in ("dropped", "pages_read", "chosen") if name in extra)]


def same(batch, sparse=None, limits=(16, 23, 64), threads=(1, 3), isas=ISAS, planes=False):
    for isa in isas:
        kernels.set_isa(isa)
        want = run(batch, sparse)
        for limit in limits:
            pool = Pool(batch, limit, planes)
            found = run(batch, sparse, pool, threads[limit % len(threads)])
            for x, y in zip(found, want, strict=True):
                assert torch.equal(x.nan_to_num(7), y.nan_to_num(7)), (isa, limit)
            assert pool.waves > 1
    kernels.set_isa(ISAS[0])
    return pool


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [(4, 4), (8, 4), (8, 8), (16, 16)])
def test_dense(bits, dtype):
    same(make_batch(MIXED, make_format(*bits), dtype=dtype), limits=(16, 50))


@pytest.mark.parametrize("fmt", GROUPS)
def test_groups_of_32(fmt):
    batch = make_batch(MIXED, fmt, page_spread=0.5)
    same(batch, limits=(16, 50))
    same(batch, SparseSettings(**SMALL, scoring="cascade" if fmt.keys_by_channel else "header"), limits=(23,))


@pytest.mark.parametrize("page_size", [32, 64, 96, 128, 160, 224, 256])
@pytest.mark.parametrize(("heads", "dim"), [((1, 1), 64), ((8, 1), 80), ((4, 4), 96), ((6, 2), 128), ((5, 1), 256)])
def test_page_sizes_heads_and_dims(page_size, heads, dim):
    rows = [(1, 5000), (130, 4200), (2, 4097), (40, 4095)]
    batch = make_batch(rows, page_size=page_size, q_heads=heads[0], kv_heads=heads[1], dim=dim, page_spread=0.5)
    same(batch, limits=(16, 18, 33), isas=ISAS[:1])
    settings = SparseSettings(**{**SMALL, "window": -(-256 // page_size) * page_size, "sinks": page_size})
    same(batch, settings, limits=(16, 18, 33), isas=ISAS[:1])


@pytest.mark.parametrize("scoring", ["header", "cascade", "codes"])
@pytest.mark.parametrize("bits", [(4, 4), (8, 8)])
@pytest.mark.parametrize("spread", [0.0, 1.5])
def test_sparse(scoring, bits, spread):
    """Near-random keys (spread 0) make the cascade look into nearly all pages, a wave after the other."""
    batch = make_batch(MIXED, make_format(*bits), page_spread=spread)
    pool = same(batch, SparseSettings(**SMALL, scoring=scoring), limits=(16, 40))
    assert bool(pool.probed) == (scoring != "header")
    pool = same(batch, SparseSettings(**SMALL, scoring=scoring), limits=(16, 40), planes=True)
    assert not pool.probed


def test_open_tail_residual_pages_and_sealed_tails():
    for extra in ({"extra_open": 0}, {"extra_open": 4}, {"seal_tail": True}):
        batch = make_batch([(1, 2000), (100, 1700), (64, 1024)], page_size=32, **extra)
        same(batch, isas=ISAS[:1])
        same(batch, SparseSettings(**{**SMALL, "sinks": 32}), isas=ISAS[:1])


def test_rows_that_share_their_prefix_fetch_it_once():
    batch = make_batch([(1, 1280), (1, 1280), (1, 1280)], extra_open=0)
    batch.inputs["block_table"][1:, :20] = batch.inputs["block_table"][0, :20]
    pool = Pool(batch, 20)
    run(batch, None, pool)
    assert (pool.waves, pool.fetched) == (1, 20)


def test_waves_whose_pages_are_all_there_are_not_fetched():
    batch = make_batch([(1, 1280), (70, 640)], extra_open=0)
    pool = Pool(batch, 32)
    state, parts, touched = (np.zeros(32, np.uint8) for _ in range(3))
    pool.slots = (*(x.ctypes.data for x in (state, parts, touched)), 3, 7)
    want = run(batch, None)

    def check(waves, marks):
        pool.waves = 0
        for x, y in zip(run(batch, None, pool), want, strict=True):
            assert torch.equal(x, y)
        assert (pool.waves, int(touched.sum())) == (waves, marks)

    check(2, 0)  # each row's pages
    blocks = torch.cat([batch.inputs["block_table"][0, :20], batch.inputs["block_table"][1, :10]])
    pool.limit = 30
    pool.fetch(blocks.numpy(), False)
    pool.limit = 32
    state[:], parts[:] = 3, 7
    check(0, 30)
    touched[:] = 0
    parts[pool.payload_slot[blocks[25].long()]] = 5
    check(1, 20)
    pool.payload_slot[blocks[3].long()] = -1
    check(2, 20)


def test_what_fetch_raises_is_raised_and_a_small_limit_refused():
    batch = make_batch(MIXED)

    class Fails(Pool):
        def fetch(self, blocks, scoring):
            if self.waves == self.good:
                raise OSError("page 17 is gone")
            super().fetch(blocks, scoring)

    for sparse in (None, SparseSettings(**SMALL)):
        for good in (0, 1, 5, 9):
            pool = Fails(batch, 16)
            pool.good = good
            with pytest.raises(OSError, match="page 17 is gone"):
                run(batch, sparse, pool, threads=2)
    with pytest.raises(ValueError, match=r"residency.limit: found 15, needed at least 16"):
        run(batch, None, Pool(batch, 15))
