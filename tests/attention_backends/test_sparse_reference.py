"""The sparse oracle and the token-level references: where they must equal dense attention, and where not."""

import pytest
import torch

from tests.attention_backends.cases import compare, make_batch, make_format
from vllm_ktx.attention_backends import reference
from vllm_ktx.attention_backends.selection import SCORERS, SparseSettings
from vllm_ktx.attention_backends.sparse import (
    AttentionFusion,
    GlobalAttention,
    GlobalTokenSelector,
    LocalSlidingWindowAttention,
    OverlappedBlockAttention,
    SparseAttention,
    masked_attention,
    sparse_attention_reference,
)
from vllm_ktx.attention_backends.torch_kernels import TorchKernels
from vllm_ktx.kv_quant import KVCacheQuantizer

ROWS = [(1, 1500), (150, 1111), (3, 1280), (1, 0), (70, 30)]
SMALL = {"window": 256, "min_pages": 2, "max_pages": 6}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def headers_of(batch):
    """Headers of all blocks, of the keys that their payloads read back as."""
    slots = batch.inputs["payload_slot"]
    payload = batch.inputs["payload"]
    quantizer = KVCacheQuantizer(batch.layout)
    if not batch.layout.fmt.quantized:
        return None
    return quantizer.make_header(quantizer.unseal(payload if slots is None else payload[slots.long()])[0])


def run(batch, settings, **more):
    inputs = {"headers": headers_of(batch), **batch.inputs, **more}
    return sparse_attention_reference(batch.layout, settings=settings, **inputs)


def batch_of(rows=ROWS, fmt=None, **more):
    return make_batch(rows, fmt, q_heads=4, dim=32, dtype=torch.float32, **more)


# --- the page oracle --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scoring", ["header", "codes", "cascade"])
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_full_coverage_is_dense(bits, scoring):
    batch = batch_of(fmt=make_format(bits, bits))
    got = run(batch, SparseSettings(window=256, scoring=scoring, coverage=1.0, min_pages=2, max_pages=2))
    want, want_lse = batch.expected()
    torch.testing.assert_close(got.out, want, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got.lse, want_lse, rtol=1e-9, atol=1e-9)
    assert got.dropped.abs().max() < 1e-12
    assert got.pages_read[0].tolist() == [24, 24]


@pytest.mark.parametrize("name", SCORERS)
def test_output_is_attention_over_the_lists(name):
    """Whatever a scorer picks: sinks, window and partial page are in, and the output is exact over what was read."""
    batch = batch_of()
    settings = SparseSettings(**SMALL, coverage=0.7)
    got = run(batch, settings, scorer=SCORERS[name]())
    again = run(batch, settings, lists=got.lists)
    torch.testing.assert_close(got.out, again.out)
    torch.testing.assert_close(got.lse, again.lse)
    assert (got.dropped >= 0).all() and (got.dropped <= 1).all() and got.dropped[0].max() > 0
    for heads in got.lists[0][:1]:
        pages = heads.tolist()
        assert pages == sorted(set(pages)) and pages[0] == 0
        assert set(range((1500 - 256) // 64, 24)) <= set(pages)
        assert 2 <= len(pages) - 6 <= 6
    assert got.pages_read.tolist() == [[len(pages) for pages in heads] for heads in got.lists]


def test_dropped_mass_is_true_for_the_oracle():
    """A row decision with the oracle as scorer knows what it drops: 1 - exp(lse of what is read - lse of all)."""
    batch = batch_of(rows=[(1, 1500), (3, 1280)], seal_tail=True)
    got = run(batch, SparseSettings(**SMALL, coverage=0.6), scorer=SCORERS["oracle"]())
    _, lse = batch.expected()
    missing = (1 - torch.exp(got.lse - lse)).reshape(4, 2, 2).mean(2)
    torch.testing.assert_close(got.dropped, missing)


def test_more_coverage_reads_no_less():
    batch = batch_of()
    results = [run(batch, SparseSettings(window=256, min_pages=1, coverage=c)) for c in (0.3, 0.6, 0.9, 0.99, 1.0)]
    want, _ = batch.expected()
    errors = [float((each.out - want).square().mean()) for each in results]
    for low, high in zip(results, results[1:], strict=False):
        assert (low.pages_read <= high.pages_read).all()
        assert (low.dropped >= high.dropped - 1e-12).all()
    assert errors[0] > errors[2] > errors[-1]


def test_rows_do_not_depend_on_the_batch():
    settings = SparseSettings(**SMALL, coverage=0.7)
    batch = batch_of()
    whole = run(batch, settings)
    bounds = batch.inputs["cu_q"].tolist()
    for row in range(len(ROWS)):
        at = slice(bounds[row], bounds[row + 1])
        part = {name: batch.inputs[name][at] for name in ("q", "k", "v")}
        part |= {name: batch.inputs[name][row : row + 1] for name in ("context", "block_table")}
        alone = run(batch, settings, cu_q=torch.tensor([0, at.stop - at.start]), **part)
        assert torch.equal(alone.out, whole.out[at]) and torch.equal(alone.pages_read, whole.pages_read[at])


def test_blocks_share_a_list_and_the_last_rows_do_not():
    batch = batch_of(rows=[(150, 1500)], page_size=32)
    got = run(batch, SparseSettings(**SMALL, coverage=0.7))
    for begin in (0, 64):
        for token in range(begin, begin + 64):
            assert got.lists[token] is got.lists[begin]
            assert torch.equal(got.dropped[token], got.dropped[begin])
    assert len({tuple(got.dropped[token].tolist()) for token in range(128, 150)}) == 22


def test_chunk_longer_than_the_window():
    """The window ends inside the chunk: whole pages of the context are candidates, the partial one is always read."""
    for context in (900, 896):
        batch = batch_of(rows=[(500, context)])
        got = run(batch, SparseSettings(**SMALL, sinks=0, coverage=0.5))
        last = -(-context // 64) - 1
        assert all((last in pages.tolist()) for heads in got.lists for pages in heads) or context % 64 == 0
        assert got.pages_read[-60:].max() <= 7
        assert torch.isfinite(got.out).all()
        dense = run(batch, SparseSettings(**SMALL, sinks=0, coverage=1.0))
        torch.testing.assert_close(dense.out, batch.expected()[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("extra", [-1, 0, 1, 63, 64, 65])
def test_window_edges(extra):
    """One sink page, `min_pages` + 1 candidates from context 256 + 64 * 4 on; below that a row is dense."""
    context = 256 + 64 * 4 + extra
    batch = batch_of(rows=[(1, context)], seal_tail=True)
    got = run(batch, SparseSettings(**SMALL, coverage=1e-9))
    candidates = (context - 256) // 64 - 1
    pages = -(-context // 64)
    assert got.pages_read[0].tolist() == [pages if candidates <= 2 else pages - candidates + 2] * 2
    first = (context - 256) // 64
    if candidates > 2:
        assert set(range(first, pages)) <= set(got.lists[0][0].tolist())


def test_short_contexts_are_dense():
    batch = batch_of(rows=[(1, 0), (1, 1), (2, 63), (1, 64), (130, 10), (1, 700)])
    got = run(batch, SparseSettings())
    want, want_lse = batch.expected()
    torch.testing.assert_close(got.out, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got.lse, want_lse, rtol=1e-12, atol=1e-12)
    assert (got.dropped == 0).all()


def test_context_only_and_softcap():
    batch = batch_of(softcap=3.0)
    for own in ({}, {"k": None, "v": None}):
        got = run(batch, SparseSettings(window=256, coverage=1.0, min_pages=2), **own)
        torch.testing.assert_close(got.out, batch.expected(**own)[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_bad_rows_stay_alone(bad):
    """A query or a fresh value that isn't finite spoils its own row at most, and never ends in an error."""
    batch = batch_of(rows=[(1, 1500), (80, 1300)])
    settings = SparseSettings(**SMALL, coverage=0.7)
    want = run(batch, settings)
    q, v = batch.inputs["q"].clone(), batch.inputs["v"].clone()
    q[0], v[-1] = bad, bad
    got = run(batch, settings, q=q, v=v)
    torch.testing.assert_close(got.out[1:-1], want.out[1:-1])
    assert got.pages_read.min() >= 2 and (got.dropped >= 0).all()


@pytest.mark.parametrize("settings", [
    SparseSettings(**SMALL, coverage=0.7),
    SparseSettings(window=256, min_pages=2, select="top_k", top_k=3),
    SparseSettings(window=256, min_pages=2, select="global_ratio", global_ratio=0.2, scoring="header"),
])  # fmt: skip
def test_torch_kernels_follow(settings):
    batch = batch_of()
    tokens = len(batch.inputs["q"])
    dropped = torch.full((tokens, 2), float("nan"))
    pages_read, depth = torch.full((tokens, 2), -1, dtype=torch.int32), torch.full((tokens, 2), float("nan"))
    out, lse = torch.empty_like(batch.inputs["q"]), torch.empty(tokens, 4)
    kernels = TorchKernels()
    extra = {"headers": headers_of(batch), "sparse": settings, "depth": depth}
    extra |= {"dropped": dropped, "pages_read": pages_read}
    kernels.attention(batch.layout, out=out, lse=lse, **extra, **batch.inputs)
    want = run(batch, settings)
    assert torch.equal(pages_read, want.pages_read)
    torch.testing.assert_close(depth.double(), want.depth, rtol=1e-5, atol=0)
    torch.testing.assert_close(dropped.double(), want.dropped, rtol=1e-4, atol=1e-5)
    compare(out, lse, want.out, want.lse, 2e-5, settings)


def test_page_size_must_divide_the_window():
    with pytest.raises(ValueError, match="ktx.window=1000"):
        run(batch_of(rows=[(1, 10)]), SparseSettings(window=1000))


# --- token-level references -------------------------------------------------------------------------------------------


def tokens(count=300, queries=7, heads=2, group=3, dim=32):
    torch.manual_seed(0)
    return torch.randn(queries, heads * group, dim), torch.randn(count, heads, dim), torch.randn(count, heads, dim)


def dense(q, keys, values):
    return reference.attend(q, keys, values, torch.arange(len(keys) - len(q), len(keys)) + 1, 0.2)


def same(got, want):
    torch.testing.assert_close(got[0], want[0])
    torch.testing.assert_close(got[1], want[1])


def test_fusion_of_disjoint_parts_is_full_attention():
    q, keys, values = tokens()
    token = torch.arange(300)
    causal = token <= torch.arange(293, 300).unsqueeze(1)
    parts = [masked_attention(q, keys, values, causal & (token % 3 == i), 0.2) for i in range(3)]
    nothing = masked_attention(q, keys, values, causal & False, 0.2)
    same(AttentionFusion()(*parts, nothing), dense(q, keys, values))


@pytest.mark.parametrize(("window", "budget", "sinks"), [(300, 0, 0), (64, 300, 4), (1, 300, 0)])
def test_sparse_attention_that_reads_all_is_dense(window, budget, sinks):
    q, keys, values = tokens()
    same(SparseAttention.of(window, budget, sinks)(q, keys, values, 0.2), dense(q, keys, values))


def test_sparse_attention_reads_window_sinks_and_the_best():
    q, keys, values = tokens()
    selector = GlobalTokenSelector(budget=10, first=4, last=32)
    mask = selector.mask(q, keys, 0.2)
    importance = selector.importance(q, keys, 0.2)
    assert mask.shape == (2, 1, 7, 300)
    for t, position in enumerate(range(293, 300)):
        chosen = mask[0, 0, t].nonzero().flatten().tolist()
        assert len(chosen) == 4 + 32 + 10 and max(chosen) == position
        assert {*range(4), *range(position - 31, position + 1)} <= set(chosen)
        others = importance[0, t, [i for i in range(position + 1) if i not in chosen]]
        assert others.max() <= importance[0, t, chosen].min()
    got = SparseAttention.of(32, 10, 4)(q, keys, values, 0.2)
    same(got, masked_attention(q, keys, values, mask, 0.2))
    same(GlobalAttention(selector)(q, keys, values, 0.2), got)


def test_local_window():
    q, keys, values = tokens()
    got = LocalSlidingWindowAttention(16)(q[-1:], keys, values, 0.2)
    same(got, dense(q[-1:], keys[-16:], values[-16:]))


def test_hidden_values_do_not_leak():
    q, keys, values = tokens()
    values[:200] = float("nan")
    assert torch.isfinite(LocalSlidingWindowAttention(16)(q, keys, values, 0.2)[0]).all()


def test_overlapped_blocks():
    attention = OverlappedBlockAttention(block=100, overlap=0.1)
    q, keys, values = tokens(queries=300)
    mask = attention.mask(q, keys)
    assert attention.stride == 90 and mask.sum(1).max() == 100
    assert mask[100:].sum(1).min() == 11  # ten tokens of history and itself
    assert mask[99, 0] and not mask[100, 89] and mask[100, 90]
    same(OverlappedBlockAttention(block=512)(q, keys, values, 0.2), dense(q, keys, values))
    with pytest.raises(ValueError, match="overlap=1"):
        OverlappedBlockAttention(overlap=1.0)
