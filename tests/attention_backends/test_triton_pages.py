"""Pages beyond the device's memory, in Triton's interpreter (`test_triton.py` starts it): the same output to the bit as
with all pages on the device, however many slots there are, and a page table that follows a plain model of it.
"""

import os
import random

import pytest
import torch

from tests.attention_backends.cases import GROUPS, make_batch, make_format
from vllm_ktx.attention_backends.selection import SparseSettings
from vllm_ktx.attention_backends.self_check import KernelError, self_check
from vllm_ktx.kv_quant import PageLayout, parse_format

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1: test_triton.py runs it", allow_module_level=True)
pytest.importorskip("triton")
from vllm_ktx.attention_backends.triton import device_pages
from vllm_ktx.attention_backends.triton.device_pages import FREE, DevicePages
from vllm_ktx.attention_backends.triton.geometry import Geometry
from vllm_ktx.attention_backends.triton.launch import TritonKernels, launch
from vllm_ktx.attention_backends.triton.residency import AGED, DECODE, NOW, ROUND

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of masked lanes
torch.set_num_threads(1)
kernels = TritonKernels()
SMALL = {"window": 64, "sinks": 32, "min_pages": 2, "max_pages": 5}
slow = pytest.mark.slow


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    monkeypatch.setattr(device_pages, "FETCHERS", 3)  # the interpreter runs them one by one


def beyond(batch, num_slots, planes=False):
    """`batch`'s pages in host memory, and slots that hold garbage (NaN scales). Without planes blocks lie there in any
    order, among rows that hold garbage too."""
    inputs, layout = batch.inputs, batch.layout
    at = inputs["payload_slot"]
    host = inputs["payload"][: len(inputs["open_slot"])] if at is None else inputs["payload"][at.long()]
    slots = torch.full((num_slots, layout.payload_bytes + 64), 255, dtype=torch.uint8)[:, : layout.payload_bytes]
    if planes:
        return DevicePages(layout, slots, host.contiguous(), host[:, : layout.scoring_bytes].clone())
    home = torch.randperm(len(host) + 3, generator=torch.Generator().manual_seed(num_slots))[: len(host)]
    rows = torch.full((len(host) + 3, layout.payload_bytes), 255, dtype=torch.uint8)
    rows[home] = host
    return DevicePages(layout, slots, rows, home=home.int())


def check_table(pages):
    """The two halves of the page table agree, and every slot holds its block's bytes."""
    owned = (pages.block_of >= 0).nonzero()[:, 0]
    blocks = pages.block_of[owned].long()
    assert len(blocks.unique()) == len(blocks) == (pages.slot_table >= 0).sum()
    assert torch.equal(pages.slot_table[blocks].long(), owned)
    at_home = blocks if pages.home is None else pages.home[blocks].long()
    assert torch.equal(pages.slots[owned], pages.host[at_home])


def small_batch(rows, **changes):
    shape = {"page_size": 32, "q_heads": 3, "kv_heads": 1, "dim": 32, "dtype": torch.float32, "page_spread": 0.7}
    return make_batch(rows, **{**shape, **changes})


def check(batch, settings, sizes, steps=3, planes=(False, True)):
    """Each of `sizes` slots, over some steps, against all pages on the device."""
    given = {} if settings is None else {"sparse": settings, "headers": batch.headers}
    want = batch.run(kernels, **given)
    for i, size in enumerate(sizes):
        pages = beyond(batch, size, planes[i % len(planes)])
        for step in range(steps):
            got = batch.run(kernels, payload=None, payload_slot=None, residency=pages, **given)
            assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1]), f"{size} slots, step {step}"
            check_table(pages)
        hits, fetched, in_place = pages.counts.tolist()
        if size >= len(pages.slot_table):  # each page comes once
            assert in_place == 0 and 0 < fetched == (pages.block_of >= 0).sum() and hits >= fetched * (steps - 1)
        else:
            assert in_place > 0 and fetched >= size and (pages.block_of >= 0).all()
    return want


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sparse_decode_is_the_same_to_the_bit_over_any_pool(dtype):
    batch = small_batch([(1, 500), (0, 100), (1, 416), (1, 60)], dtype=dtype)
    sizes, steps = ([2, 64], 2) if dtype == torch.float32 else ([1], 1)
    check(batch, SparseSettings(**SMALL, coverage=0.8), sizes, steps)


@pytest.mark.parametrize(
    ("scoring", "fmt"), [("header", make_format()), ("codes", make_format()), ("codes", GROUPS[0])]
)
def test_scoring_reads_host_memory_or_the_planes(scoring, fmt):
    batch = small_batch([(1, 260)], q_heads=4, kv_heads=2, fmt=fmt)
    check(batch, SparseSettings(**SMALL, scoring=scoring, coverage=0.8), [3, 3], steps=1)


def test_sparse_prefill_and_decode_together():
    batch = small_batch([(66, 330), (1, 250)], q_heads=2)
    check(batch, SparseSettings(**SMALL, coverage=0.8), [2], steps=1)


@pytest.mark.parametrize("fmt", [{}, {"k_bits": 8, "v_bits": 8}, {"k_bits": 16, "v_bits": 16}])
def test_dense(fmt):
    batch = make_batch([(1, 140), (1, 0), (0, 40), (5, 96)], make_format(**fmt), 32, 3, 1, 32, torch.float32)
    check(batch, None, [1, 30], steps=2)


@slow
@pytest.mark.parametrize("shape", [{}, {"page_size": 64, "q_heads": 6, "kv_heads": 2, "dim": 80}, {"softcap": 4.0}])
def test_mixed_batches(shape):
    batch = small_batch([(130, 500), (1, 600), (3, 400)], **shape)
    check(batch, SparseSettings(**SMALL, coverage=0.8), [3, 100], steps=2)


def sealed(layout, blocks, seed):
    torch.manual_seed(seed)
    k, v = torch.randn(2, len(blocks), layout.num_kv_heads, layout.page_size, layout.head_dim)
    return k, v, torch.arange(len(blocks)) * k.stride(0), torch.tensor(blocks, dtype=torch.int32)


@pytest.mark.parametrize("fmt", [parse_format("k4v4"), parse_format("none"), GROUPS[0]])
def test_new_pages_go_to_host_memory_to_their_slot_and_to_the_planes(fmt):
    layout = PageLayout(fmt, 32, 2, 32, dtype_bytes=4)
    planes = torch.zeros(6, layout.scoring_bytes, dtype=torch.uint8)
    host, slots = (torch.zeros(n, layout.payload_bytes, dtype=torch.uint8) for n in (6, 2))
    pages = DevicePages(layout, slots, host, planes)
    pages.slot_table[4], pages.block_of[1] = 1, 4  # one of the blocks is on the device
    for seed in range(2):  # new content of the same blocks
        k, v, source, blocks = sealed(layout, [4, -1, 2], seed)
        headers, want_headers = torch.zeros(2, 6, layout.header_bytes, dtype=torch.uint8)
        want = torch.zeros(6, layout.payload_bytes, dtype=torch.uint8)
        strides = (k.stride(2), k.stride(1))
        kernels.seal(layout, k, v, source, blocks, want_headers, want, None, *strides)
        pages.seal(kernels, layout, k, v, source, blocks, headers, *strides)
        assert want[2].any() and torch.equal(host, want) and torch.equal(headers, want_headers)
        assert torch.equal(slots, torch.stack((torch.zeros_like(want[4]), want[4])))
        assert torch.equal(planes, want[:, : layout.scoring_bytes])
    assert torch.equal(pages.read(kernels, torch.tensor([2, 0])), want[[2, 0]])


def test_new_pages_without_a_home_are_left_out_and_what_is_reopened_comes_from_there():
    layout = PageLayout(parse_format("k4v4"), 32, 2, 32, dtype_bytes=4)
    host, slots = (torch.zeros(n, layout.payload_bytes, dtype=torch.uint8) for n in (3, 2))
    pages = DevicePages(layout, slots, host, home=torch.tensor([-1, -1, 2, -1, 0, -1], dtype=torch.int32))
    k, v, source, blocks = sealed(layout, [4, 5, 2], 1)
    headers, want = (torch.zeros(6, size, dtype=torch.uint8) for size in (layout.header_bytes, layout.payload_bytes))
    strides = (k.stride(2), k.stride(1))
    kernels.seal(layout, k, v, source, blocks, headers, want, None, *strides)
    pages.seal(kernels, layout, k, v, source, blocks, headers, *strides)
    assert torch.equal(host[[0, 2]], want[[4, 2]]) and not host[1].any() and not slots.any()
    assert torch.equal(pages.read(kernels, torch.tensor([2, 4])), want[[2, 4]])


def test_attention_reads_new_content_of_a_page_that_had_a_slot():
    batch = make_batch([(1, 140)], make_format(), 32, 2, 1, 32, torch.float32, scattered_slots=False)
    pages, table = beyond(batch, 8, planes=True), batch.inputs["block_table"][0]
    before = batch.run(kernels, payload=None, residency=pages)[0]
    assert (pages.slot_table[table[:2].long()] >= 0).all()
    k, v, source, blocks = sealed(batch.layout, table[:2].tolist(), 5)
    for seal, to in ((kernels.seal, (batch.headers, batch.inputs["payload"], None)),
                     (lambda *given: pages.seal(kernels, *given), (batch.headers,))):  # fmt: skip
        seal(batch.layout, k, v, source, blocks, *to, k.stride(2), k.stride(1))
    want, after = batch.run(kernels)[0], batch.run(kernels, payload=None, residency=pages)[0]
    assert torch.equal(after, want) and not torch.equal(after, before)
    check_table(pages)


class Model:
    """What the page table must do, one round at a time."""

    def __init__(self, num_slots):
        self.block_of, self.used = [-1] * num_slots, [FREE] * num_slots
        self.now = self.hand = 0
        self.counts = [0, 0, 0]

    def round(self, rows, tick):
        """`rows`: whether it is a prompt, its sealed blocks. Returns the slots that get new pages, and the misses."""
        asked, misses = set(), ([], [])
        for prompt, blocks in rows:
            for block in blocks:
                if block in self.block_of:
                    self.counts[0] += block not in asked
                    if not prompt:
                        self.used[self.block_of.index(block)] = self.now
                elif block not in asked:
                    misses[prompt].append(block)
                asked.add(block)
        taken = ([], [])
        order = [(self.hand + i) % len(self.used) for i in range(len(self.used))]
        busy = {slot for slot in order if self.block_of[slot] in asked}
        for prompt, ages in enumerate(((64, 16, 4, 1), (64, 16))):
            for age in ages:
                for slot in order:
                    if len(taken[prompt]) < len(misses[prompt]) and slot not in busy and self.age(slot) >= age:
                        taken[prompt].append(slot)
                        busy.add(slot)
                        self.hand = (slot + 1) % len(order)
            for slot in taken[prompt]:
                self.used[slot] = self.now - AGED.value * prompt
        found = len(taken[0]) + len(taken[1])
        self.counts[1] += found
        self.counts[2] += len(misses[0]) + len(misses[1]) - found
        self.now += tick
        return taken, misses

    def age(self, slot):
        return self.now - self.used[slot]


@pytest.mark.parametrize("num_slots", [1, 17, 40])
def test_the_page_table_follows_the_model(num_slots):
    rng, blocks = random.Random(num_slots), 30
    layout = PageLayout(parse_format("k4v4"), 32, 1, 16)
    shape = Geometry.of(layout, 1, torch.float32)
    host = torch.randint(0, 255, (blocks, layout.payload_bytes), dtype=torch.uint8)
    pages = DevicePages(layout, torch.zeros(num_slots, layout.payload_bytes, dtype=torch.uint8), host)
    model = Model(num_slots)
    for _ in range(25):
        open_slot = torch.full((blocks,), -1, dtype=torch.int32)
        open_slot[rng.sample(range(blocks), 2)] = 0
        fresh = [rng.choice((1, 1, 2, DECODE.value, DECODE.value + 1, 70)) for _ in range(3)]
        tables = [rng.sample(range(blocks), rng.randrange(1, 9)) for _ in range(3)]
        table = torch.zeros(3, 8, dtype=torch.int32)
        for row, own in enumerate(tables):
            table[row, : len(own)] = torch.tensor(own)
        tick = rng.randrange(2)
        units = torch.tensor([[row, 0] for row in range(3)], dtype=torch.int32)
        totals, context = torch.tensor([3, 0]).int(), torch.tensor([32 * len(own) for own in tables]).int()
        before = list(model.block_of)
        rows = [(int(n > DECODE.value), [b for b in own if open_slot[b] < 0])
                for n, own in zip(fresh, tables, strict=True)]  # fmt: skip
        taken, misses = model.round(rows, tick)
        cu_q = torch.tensor([0, *fresh]).cumsum(0).int()
        pages.begin_round(
            launch, (3, 1, 8), (cu_q, context, table, open_slot, units, totals, units, units),
            (table.stride(0), 1, 0, 0, 0, 1 << 20), tick, BLOCKS=False, CHOSEN=False, L=shape,
        )  # fmt: skip
        check_table(pages)
        for slots, wanted in zip(taken, misses, strict=True):
            got = pages.block_of[slots].tolist()
            assert set(got) <= set(wanted) and len(got) == len(set(got)), "each miss once, in slots of its kind"
            for slot, block in zip(slots, got, strict=True):
                before[slot] = model.block_of[slot] = block
        assert pages.block_of.tolist() == before, "no other slot changes hands"
        assert pages.counts.tolist() == model.counts and pages.used.tolist() == model.used
        assert pages.clock[NOW.value] == model.now and pages.clock[2] == model.hand
    assert pages.clock[ROUND.value] == 25 and all(model.counts[:2])


def test_replacement_finds_nearly_what_the_least_recently_used_would():
    """Of pages that drift as decode's do, on the model above; against exact LRU."""
    rng, size, blocks = random.Random(0), 60, 300
    model, recent = Model(size), []  # `recent`: least recently used first
    asked, hits, working = 0, 0, set(rng.sample(range(blocks), 25))
    for _ in range(300):
        for page in rng.sample(sorted(working), 3):
            working.remove(page)
        while len(working) < 25:
            working.add(min(int(rng.paretovariate(0.6)), blocks - 1))
        asked += len(working)
        hits += len(working & set(recent))
        recent = ([page for page in recent if page not in working] + sorted(working))[-size:]
        taken, misses = model.round([(0, sorted(working))], 1)
        for slot, block in zip(taken[0], misses[0], strict=False):
            model.block_of[slot] = block
    assert 0.8 < hits / asked < 0.99 and abs(model.counts[0] - hits) / asked < 0.005


def test_a_long_prompt_leaves_what_decode_works_on():
    """Decode reads 6 pages each step while a prompt passes 24 others, 8 a step, through a pool of 10."""
    layout = PageLayout(parse_format("k4v4"), 32, 1, 16)
    host = torch.zeros(30, layout.payload_bytes, dtype=torch.uint8)
    pages = DevicePages(layout, torch.zeros(10, layout.payload_bytes, dtype=torch.uint8), host)
    open_slot, totals = torch.full((30,), -1, dtype=torch.int32), torch.tensor([2, 0]).int()
    units = torch.tensor([[0, 0], [1, 0]]).int()
    for step in range(12):
        table = torch.arange(8).repeat(2, 1).int()
        table[1] = 6 + step % 3 * 8 + table[1]
        pages.begin_round(
            launch, (2, 1, 8),
            (torch.tensor([0, 1, 101]).int(), torch.tensor([6 * 32, 8 * 32]).int(), table, open_slot, units, totals,
             units, units),
            (8, 1, 0, 0, 0, 1 << 20), 1, BLOCKS=False, CHOSEN=False, L=Geometry.of(layout, 1, torch.float32),
        )  # fmt: skip
        assert (pages.slot_table[:6] >= 0).all()
        assert (pages.slot_table[6:] >= 0).sum() == 4, "the prompt has the other slots"
    assert pages.counts.tolist() == [11 * 6, 6 + 12 * 4, 12 * 4]


def test_what_does_not_fit_is_said():
    layout = PageLayout(parse_format("k4v4"), 32, 1, 32)
    host = torch.zeros(4, layout.payload_bytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match="slots: found"):
        DevicePages(layout, host[:, :64], host)
    with pytest.raises(ValueError, match="at least one row"):
        DevicePages(layout, host[:0], host)
    batch = small_batch([(1, 70)])
    with pytest.raises(ValueError, match="take DevicePages"):
        batch.run(kernels, residency=object())


def test_the_check_before_serving_sees_pages_that_went_astray_and_nothing_else(monkeypatch):
    layout, fetch = PageLayout(parse_format("k4v4"), 32, 1, 32, 2), DevicePages.fetch

    def astray(self, launch):
        fetch(self, launch)
        self.slots.copy_(self.slots.roll(1, 0))

    monkeypatch.setattr(DevicePages, "fetch", astray)
    with pytest.raises(KernelError, match=r"are wrong on this CPU: pages in host memory is off by \S+ \(0"):
        self_check(kernels, layout, 2, torch.float16, torch.device("cpu"), SparseSettings(), paged=True)
