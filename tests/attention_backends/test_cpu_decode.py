"""`ktx_attention` against float64 attention over the pages as kv_quant reads them back, for every instruction set."""

import copy
import itertools
import math

import pytest
import torch

from tests.attention_backends.cases import GROUPS
from vllm_ktx.attention_backends.cpu import native
from vllm_ktx.kv_quant.codec import KVCacheQuantizer
from vllm_ktx.kv_quant.formats import KVFormat, parse_format
from vllm_ktx.kv_quant.layout import PageLayout
from vllm_ktx.kv_quant.scale_methods import SCALE_BITS, SCALE_METHODS

torch.set_num_threads(1)  # small tensors: the test of threads asks for them
kernels = native.load()
if kernels is None:
    pytest.skip("the native CPU kernels are not built", allow_module_level=True)


@pytest.fixture(params=kernels.available_isas())
def cpu(request):
    before = kernels.isa
    kernels.set_isa(request.param)
    yield kernels
    kernels.set_isa(before)


class Batch:
    """A mixed batch: `rows` of (query length, context length), each with its own pages; some pages open."""

    def __init__(self, layout, rows, heads, dtype=torch.float32, open_every=5, seed=0):
        torch.manual_seed(seed)
        self.layout, self.rows, self.heads, self.dtype = layout, rows, heads, dtype
        size, kv, dim = layout.page_size, layout.num_kv_heads, layout.head_dim
        counts = [-(-context // size) for _, context in rows]
        total = max(1, sum(counts))
        self.k_pages = torch.randn(total, kv, size, dim).to(dtype)
        self.v_pages = torch.randn(total, kv, size, dim).to(dtype)
        _, payload = KVCacheQuantizer(layout).seal(self.k_pages, self.v_pages)
        self.blocks = torch.randperm(total).int()
        self.payload = torch.full((total, layout.payload_bytes + 64), 255, dtype=torch.uint8)[:, : layout.payload_bytes]
        self.payload[self.blocks.long()] = payload
        self.table = torch.zeros(len(rows), max(1, max(counts)) + 3, dtype=torch.int32)
        self.open_slot = torch.full((total,), -1, dtype=torch.int32)
        at = opened = 0
        self.first_page, open_pages = [], []
        for row, ((_, context), count) in enumerate(zip(rows, counts, strict=True)):
            self.table[row, :count] = self.blocks[at : at + count]
            self.first_page.append(at)
            for page in range(at, at + count):
                if (page == at + count - 1 and context % size) or (open_every and page % open_every == 0):
                    self.open_slot[self.blocks[page]] = opened
                    open_pages.append(torch.stack((self.k_pages[page], self.v_pages[page])))
                    opened += 1
            at += count
        shape = (0, 2, kv, size, dim)
        self.open_pages = torch.stack(open_pages) if open_pages else torch.zeros(shape, dtype=dtype)
        self.cu_q = torch.tensor([0, *itertools.accumulate(n for n, _ in rows)], dtype=torch.int32)
        self.context = torch.tensor([context for _, context in rows], dtype=torch.int32)
        tokens = int(self.cu_q[-1])
        fused = torch.randn(tokens, heads + 2 * kv, dim).to(dtype)
        self.q, self.k, self.v = fused.split((heads, kv, kv), dim=1)
        self.scale = dim**-0.5

    def run(self, cpu, **options):
        out = torch.full((int(self.cu_q[-1]), self.heads, self.layout.head_dim), float("nan"), dtype=self.dtype)
        lse = torch.full(out.shape[:2], float("nan"))
        fresh = {"k": self.k, "v": self.v} | {name: options.pop(name) for name in ("k", "v") if name in options}
        cpu.attention(
            self.layout, self.q, fresh["k"], fresh["v"], out, self.cu_q, self.context, self.table, self.open_slot,
            self.payload, self.open_pages, self.scale, lse=lse, **options,
        )  # fmt: skip
        return out, lse

    def alone(self, row):
        """The batch that has only one of the rows."""
        one = copy.copy(self)
        first, last = self.cu_q[row], self.cu_q[row + 1]
        one.rows, one.cu_q = self.rows[row : row + 1], torch.tensor([0, last - first], dtype=torch.int32)
        one.q, one.k, one.v = (x[first:last] for x in (self.q, self.k, self.v))
        one.context, one.table = self.context[row : row + 1], self.table[row : row + 1]
        return one

    def expected(self, softcap=0.0, fresh=True):
        """float64 output and log-sum-exp."""
        kv, size, group = self.layout.num_kv_heads, self.layout.page_size, self.heads // self.layout.num_kv_heads
        keys, values = KVCacheQuantizer(self.layout).unseal(self.payload[self.blocks.long()], self.dtype)
        is_open = self.open_slot[self.blocks.long()] >= 0
        keys[is_open], values[is_open] = self.k_pages[is_open].float(), self.v_pages[is_open].float()
        outs, lses = [], []
        for row, (queries, context) in enumerate(self.rows):
            pages = slice(self.first_page[row], self.first_page[row] - (-context // size))
            parts = [
                x[pages].double().transpose(1, 2).reshape(-1, kv, keys.shape[-1])[:context] for x in (keys, values)
            ]
            own = slice(int(self.cu_q[row]), int(self.cu_q[row + 1]))
            if fresh:
                parts = [torch.cat((part, x[own].double())) for part, x in zip(parts, (self.k, self.v), strict=True)]
            k, v = (part.repeat_interleave(group, dim=1) for part in parts)
            s = torch.einsum("qhd,thd->hqt", self.q[own].double(), k) * self.scale
            s = softcap * torch.tanh(s / softcap) if softcap else s
            if fresh:
                future = torch.arange(len(k)) > context + torch.arange(queries).unsqueeze(1)
                s = s.masked_fill(future, -math.inf)
            lses.append(s.logsumexp(-1).T)
            outs.append(torch.einsum("hqt,thd->qhd", s.softmax(-1).nan_to_num(0.0), v))
        return torch.cat(outs), torch.cat(lses)


def check(batch, got, want, tolerance=None):
    tolerance = tolerance or {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[batch.dtype]
    torch.testing.assert_close(got[0].double(), want[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got[1].double(), want[1], rtol=1e-5, atol=3e-5 if batch.dtype == torch.float32 else 1e-4)


ROWS = [(1, 700), (1, 0), (1, 64), (0, 130), (2, 65), (1, 63), (1, 1100)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale_bits", SCALE_BITS)
@pytest.mark.parametrize("bits", [(4, 4), (8, 8)])
def test_methods_and_bits(bits, scale_bits, dtype):
    """Each pair of methods; float32 and 16-bit models take different ways through the codes."""
    before = kernels.isa
    for i, methods in enumerate(itertools.product(SCALE_METHODS, SCALE_METHODS)):
        fmt = KVFormat("test", *bits, *methods, i % 2 == 0, scale_bits=scale_bits)  # 5 methods: each with both
        layout = PageLayout(fmt, 64, 2, 64, dtype_bytes=dtype.itemsize)
        batch = Batch(layout, ROWS, heads=8, dtype=dtype)
        want = batch.expected()
        for isa in kernels.available_isas():
            kernels.set_isa(isa)
            check(batch, batch.run(kernels), want)
    kernels.set_isa(before)


@pytest.mark.parametrize("name", ["none", "k4v4", "k8v4", "k8v8"])
@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("page_size", [32, 64, 128])
def test_shapes(cpu, name, dim, page_size):
    layout = PageLayout(parse_format(name), page_size, 2, dim, dtype_bytes=4)
    edge = 3 * page_size
    batch = Batch(layout, [(1, edge - 1), (1, edge), (1, edge + 1), (1, 16 * page_size + 1)], heads=6)
    check(batch, batch.run(cpu), batch.expected())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", range(1, 9))
@pytest.mark.parametrize("fmt", GROUPS)
def test_groups_of_32(cpu, fmt, heads, dtype):
    """One token, pages' and groups' ends, every group of query heads, several widths."""
    dim, page_size = (64, 96, 128, 256)[heads % 4], (32, 64, 160)[heads % 3]
    layout = PageLayout(fmt, page_size, 1, dim, dtype_bytes=dtype.itemsize)
    ends = [1, 31, 32, 33, page_size - 1, page_size, page_size + 1, 2 * page_size + 33]
    batch = Batch(layout, [(1, end) for end in ends], heads, dtype, open_every=0)
    batch.open_slot[:] = -1  # partial pages too are read from their codes
    check(batch, batch.run(cpu), batch.expected())


@pytest.mark.parametrize("name", ["none", "k4v4", "k8v8"])
@pytest.mark.parametrize("heads", [(1, 1), (2, 1), (9, 3), (4, 1), (5, 1), (12, 2), (14, 2), (8, 1), (16, 1), (11, 1)])
def test_groups(cpu, name, heads):
    layout = PageLayout(parse_format(name), 32, heads[1], 64, dtype_bytes=4)
    batch = Batch(layout, [(1, 150), (3, 90)], heads=heads[0])
    check(batch, batch.run(cpu), batch.expected())


@pytest.mark.parametrize("name", ["none", "k4v4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(cpu, name, dtype):
    layout = PageLayout(parse_format(name), 64, 2, 128, dtype_bytes=dtype.itemsize)
    batch = Batch(layout, ROWS, heads=8, dtype=dtype)
    check(batch, batch.run(cpu), batch.expected())


@pytest.mark.parametrize("name", ["none", "k4v4", "k8v8"])
def test_context_alone_and_softcap(cpu, name):
    layout = PageLayout(parse_format(name), 64, 2, 64, dtype_bytes=4)
    batch = Batch(layout, ROWS, heads=4)
    check(batch, batch.run(cpu, k=None, v=None), batch.expected(fresh=False))
    batch.scale = 2.0
    check(batch, batch.run(cpu, softcap=5.0), batch.expected(softcap=5.0), tolerance=1e-4)


def test_nothing_to_attend(cpu):
    layout = PageLayout(parse_format("k4v4"), 32, 1, 64, dtype_bytes=4)
    batch = Batch(layout, [(1, 0), (0, 0), (1, 40)], heads=2)
    out, lse = batch.run(cpu, k=None, v=None)
    assert not out[0].any() and (lse[0] == -math.inf).all()
    assert lse[1].isfinite().all()
    empty = Batch(layout, [(0, 40)], heads=2)
    assert empty.run(cpu)[0].shape[0] == 0


@pytest.mark.parametrize("fmt", [*(parse_format(n) for n in ("none", "k4v4", "k8v8")), *GROUPS[:2]])
def test_a_row_is_the_same_in_any_batch(cpu, fmt):
    """Bitwise: neither the other rows nor the number of threads change a row's arithmetic."""
    layout = PageLayout(fmt, 64, 2, 64, dtype_bytes=4)
    rows = [(1, 1700), (1, 40), (2, 600), (1, 0), (9, 100)]
    batch = Batch(layout, rows, heads=6)
    out, lse = batch.run(cpu)
    for threads in (2, 3):
        again = batch.run(cpu, num_threads=threads)
        assert torch.equal(out, again[0]) and torch.equal(lse, again[1])
    for row in range(len(rows)):
        own = slice(int(batch.cu_q[row]), int(batch.cu_q[row + 1]))
        one = batch.alone(row).run(cpu, num_threads=1)
        assert torch.equal(out[own], one[0]) and torch.equal(lse[own], one[1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("fmt", [parse_format("none"), parse_format("k4v4"), *GROUPS[:2]])
def test_bad_queries_stay_in_their_head(cpu, bad, fmt):
    layout = PageLayout(fmt, 64, 2, 64, dtype_bytes=4)
    batch = Batch(layout, [(1, 300), (1, 300)], heads=6)
    good = batch.run(cpu)
    batch.q = batch.q.clone()
    batch.q[0, 1, 7] = bad
    out, lse = batch.run(cpu)
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[0, 1] = False
    assert torch.equal(out[mask], good[0][mask]) and torch.equal(lse[mask], good[1][mask])


def test_large_scores(cpu):
    """Scores of +-1e4: one token takes all the weight and nothing overflows."""
    layout = PageLayout(parse_format("k8v8"), 64, 1, 64, dtype_bytes=4)
    batch = Batch(layout, [(1, 500)], heads=2)
    batch.scale = 500.0
    out, lse = batch.run(cpu)
    want = batch.expected()
    torch.testing.assert_close(lse.double(), want[1], rtol=1e-5, atol=1e-1)
    torch.testing.assert_close(out.double(), want[0], rtol=1e-2, atol=1e-2)


def test_payload_slots(cpu):
    """Pages read through the page table of the hot pool give the same as pages in place."""
    layout = PageLayout(parse_format("k4v4"), 64, 2, 64, dtype_bytes=4)
    batch = Batch(layout, ROWS, heads=4)
    want = batch.run(cpu)
    order = torch.randperm(len(batch.payload))
    moved = torch.empty_like(batch.payload)
    moved[order] = batch.payload
    batch.payload = moved
    got = batch.run(cpu, payload_slot=order.int())
    assert torch.equal(got[0], want[0])


def test_argument_errors(cpu):
    layout = PageLayout(parse_format("k4v4"), 64, 2, 64, dtype_bytes=4)
    batch = Batch(layout, [(1, 70)], heads=4)
    batch.context = batch.context.long()
    with pytest.raises(ValueError, match="context"):
        batch.run(cpu)
    batch = Batch(layout, [(1, 70)], heads=5)
    with pytest.raises(ValueError, match="query heads"):
        batch.run(cpu)
    batch = Batch(layout, [(1, 70)], heads=4)
    batch.q = batch.q.half()
    with pytest.raises(ValueError, match="dtype"):
        batch.run(cpu)
