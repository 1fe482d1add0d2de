"""Sparse attention in C++ against the float64 oracle: which pages are chosen, and what comes out of them."""

import pytest
import torch

from tests.attention_backends.cases import GROUPS, TOLERANCE, compare, make_batch, make_format
from vllm_ktx.attention_backends.cpu import native
from vllm_ktx.attention_backends.selection import SparseSettings
from vllm_ktx.attention_backends.sparse_pages import BLOCK, sparse_attention_reference

kernels = native.load()
pytestmark = pytest.mark.skipif(kernels is None, reason="native kernels not built")
ISAS = kernels.available_isas() if kernels else []
SMALL = {"window": 256, "sinks": 64, "min_pages": 2, "max_pages": 12}


def run(batch, settings, isa="", **changes):
    if isa:
        kernels.set_isa(isa)
    tokens, heads = len(batch.inputs["q"]), batch.layout.num_kv_heads
    extra = {
        "dropped": torch.full((tokens, heads), -1.0),
        "depth": torch.full((tokens, heads), -1.0),
        "pages_read": torch.full((tokens, heads), -1, dtype=torch.int32),
        "chosen": torch.full((tokens, heads, 64), -1, dtype=torch.int32),
    }
    out, lse = batch.run(kernels, sparse=settings, headers=batch.headers, **extra, **changes)
    return out, lse, extra


def oracle(batch, settings, **more):
    return sparse_attention_reference(batch.layout, headers=batch.headers, settings=settings, **batch.inputs, **more)


def lists_of(batch, settings, extra):
    """The kernels' choice as the oracle takes it: pages by token and kv head."""
    lists = []
    for row, context in enumerate(batch.inputs["context"].tolist()):
        begin, end = batch.inputs["cu_q"][row : row + 2].tolist()
        last_block = max(0, (end - begin - 1) // BLOCK) * BLOCK
        for token in range(end - begin):
            asked = token // BLOCK * BLOCK if token < last_block else token
            first, last = settings.candidates(context + asked, context, batch.layout.page_size)
            pages = torch.arange(-(-context // batch.layout.page_size))
            always = pages[(pages < first) | (pages >= last)]
            own = extra["chosen"][begin + asked]
            lists.append([torch.cat((always, h[h >= 0].long())).sort().values for h in own])
    return lists


def pages_in_common(some, others):
    """How many pages two choices share, and how many the larger one has, list by list."""
    pairs = [pair for x, y in zip(some, others, strict=True) for pair in zip(x, y, strict=True)]
    hits = sum(len(set(a.tolist()) & set(b.tolist())) for a, b in pairs)
    return hits, sum(max(len(a), len(b)) for a, b in pairs)


def check(batch, settings, isas=("",), same_choice=1.0):
    """Choice and output of each instruction set against the oracle, which runs again only where the choice differs."""
    want = oracle(batch, settings)
    for isa in isas:
        out, lse, extra = run(batch, settings, isa)
        lists = lists_of(batch, settings, extra)
        assert extra["pages_read"].tolist() == [[len(h) for h in token] for token in lists]
        hits, total = pages_in_common(lists, want.lists)
        assert hits >= same_choice * total, f"{isa}: {hits} of {total} pages as the oracle chose"
        given = want if hits == total else oracle(batch, settings, lists=lists)
        compare(out, lse, given.out, given.lse, TOLERANCE[out.dtype], f"{isa} {settings}")
        assert (extra["dropped"].double() - want.dropped).abs().max() < 0.03, isa
        assert (extra["depth"].double() - want.depth).abs().max() < 0.04, isa  # one page of 25
    return extra


@pytest.mark.parametrize("scoring", ["header", "cascade", "codes"])
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "dim"), [(8, 2, 64), (4, 1, 128), (14, 2, 80), (9, 3, 96), (3, 3, 256)]
)
def test_decode_rows(scoring, q_heads, kv_heads, dim):
    rows = [(1, 2000), (1, 64 * 40), (1, 64 * 40 + 1), (1, 200), (1, 0), (3, 64 * 30 - 1)]
    batch = make_batch(rows, q_heads=q_heads, kv_heads=kv_heads, dim=dim, page_spread=0.7, seed=dim)
    settings = SparseSettings(**SMALL, scoring=scoring, coverage=0.8)
    extra = check(batch, settings, ISAS, same_choice=0.999 if scoring == "header" else 0.95)
    assert extra["pages_read"][0].max() <= 12 + 1 + 256 // 64 + 2
    assert extra["pages_read"][3].tolist() == [4] * kv_heads, "a short context is read whole"
    probed = {"header": (0, 0), "cascade": (0.35, 1), "codes": (1, 1)}[scoring]
    assert probed[0] <= extra["depth"][0].min() and extra["depth"][0].max() <= probed[1]
    assert extra["depth"][3].tolist() == [0] * kv_heads, "and has no candidates"


@pytest.mark.parametrize("fmt", GROUPS[::2])
@pytest.mark.parametrize(("page_size", "dim"), [(64, 64), (96, 128), (32, 96)])
def test_codes_of_groups_and_8_bit_scales(fmt, page_size, dim):
    batch = make_batch([(1, 2000), (2, 31 * page_size)], fmt, page_size, dim=dim, page_spread=0.7, seed=dim)
    settings = SparseSettings(
        **{**SMALL, "sinks": page_size, "window": -(-256 // page_size) * page_size}, scoring="codes", coverage=0.8
    )
    check(batch, settings, ISAS, same_choice=0.95)


@pytest.mark.parametrize(
    "fmt", [{}, {"k_bits": 8, "v_bits": 8}, {"k_method": "per_token"}, {"v_method": "per_channel"}]
)
@pytest.mark.parametrize("rows", [[(140, 2000)], [(65, 2000), (1, 2500), (64, 64 * 33)], [(160, 63), (130, 1900)]])
def test_prefill_rows(fmt, rows):
    scoring = "header" if "k_method" in fmt else "cascade"
    batch = make_batch(rows, fmt=make_format(**fmt), page_spread=0.7, seed=3)
    check(batch, SparseSettings(**SMALL, scoring=scoring, coverage=0.8), ISAS, same_choice=0.95)


@pytest.mark.parametrize("page_size", [32, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_page_sizes_and_dtypes(page_size, dtype):
    batch = make_batch([(1, 2001), (80, 1999)], page_size=page_size, dtype=dtype, page_spread=0.7)
    check(batch, SparseSettings(**SMALL, coverage=0.8), same_choice=0.95)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("scoring", ["header", "cascade"])
def test_coverage_one_is_dense(isa, scoring):
    batch = make_batch([(1, 3000), (2, 1999), (150, 2100)], page_spread=0.7)
    out, lse, extra = run(batch, SparseSettings(**SMALL, scoring=scoring, coverage=1.0), isa)
    want, want_lse = batch.expected()
    compare(out, lse, want, want_lse, TOLERANCE[out.dtype], isa)
    assert (extra["dropped"] == 0).all()


@pytest.mark.parametrize(
    ("select", "more", "pages"), [("top_k", {"top_k": 5}, 5), ("global_ratio", {"global_ratio": 0.1}, 5)]
)
def test_fixed_counts(select, more, pages):
    batch = make_batch([(1, 64 * 47)], page_spread=0.7)
    extra = check(batch, SparseSettings(**SMALL, select=select, **more), same_choice=0.9)
    assert ((extra["chosen"] >= 0).sum(-1) == pages).all()


def test_a_row_is_bitwise_the_same_alone_and_in_any_batch_and_on_any_threads():
    rows = [(1, 5000), (1, 3000), (70, 2500), (3, 4000), (1, 100)]
    batch = make_batch(rows, page_spread=0.5)
    settings = SparseSettings(**SMALL, coverage=0.9)
    together = run(batch, settings)[0]
    assert torch.equal(together, run(batch, settings, num_threads=1)[0])
    for row in range(len(rows)):
        begin, end = batch.inputs["cu_q"][row : row + 2].tolist()
        one = {name: batch.inputs[name][begin:end] for name in ("q", "k", "v")}
        one |= {
            "context": batch.inputs["context"][row : row + 1],
            "block_table": batch.inputs["block_table"][row : row + 1],
        }
        out = torch.empty_like(one["q"])
        same = {n: batch.inputs[n] for n in ("open_slot", "payload", "open_pages", "payload_slot", "scale", "softcap")}
        cu_q = torch.tensor([0, end - begin], dtype=torch.int32)
        kernels.attention(batch.layout, out=out, cu_q=cu_q, headers=batch.headers, sparse=settings, **one, **same)
        assert torch.equal(out, together[begin:end])


def test_a_query_that_is_not_finite_harms_no_other():
    batch = make_batch([(1, 3000), (1, 3000)], page_spread=0.5)
    settings = SparseSettings(**SMALL)
    clean = run(batch, settings)[0]
    batch.inputs["q"] = batch.inputs["q"].clone()
    batch.inputs["q"][0, 3, 5] = float("nan")
    batch.inputs["q"][0, 4, 5] = float("inf")
    assert torch.equal(run(batch, settings)[0][1], clean[1])


def test_sparse_needs_headers_and_keys_by_channel_for_codes():
    batch = make_batch([(1, 3000)], fmt=make_format(k_method="per_token"))
    with pytest.raises(ValueError, match="use scoring 'header'"):
        run(batch, SparseSettings())
    with pytest.raises(ValueError, match="needs headers"):
        batch.run(kernels, sparse=SparseSettings())
