"""Scorers and selectors: a shared matrix that every method goes through, and what is particular to some."""

import math
import subprocess
import sys

import pytest
import torch

from tests.attention_backends.cases import make_format
from vllm_ktx.attention_backends.selection import SCORERS, SELECTORS, ContextPages, SparseSettings, make_scorer
from vllm_ktx.attention_backends.selection.cascade import CascadeScorer, join
from vllm_ktx.attention_backends.selection.pages import estimate_mass, moments, rank, shares
from vllm_ktx.attention_backends.sparse_pages import choose
from vllm_ktx.kv_quant import KVCacheQuantizer, PageLayout

PAGES, HEADS, GROUP, SIZE, DIM = 24, 2, 3, 64, 32
FORMATS = {
    "k4": make_format(),
    "k8": make_format(8, 8),
    "per token": make_format(k_method="per_token"),
    "none": make_format(16, 16),
}


def normal(*size, seed=0):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def make_context(fmt=None, needle=False, spread=1.0, softcap=0.0, dtype=torch.float64):
    """Sealed pages whose mean keys lie `spread` apart; with `needle`, page 17 holds one key along the first query."""
    layout = PageLayout(fmt or FORMATS["k4"], SIZE, HEADS, DIM, dtype_bytes=4)
    keys = spread * normal(PAGES, HEADS, 1, DIM, seed=1) + normal(PAGES, HEADS, SIZE, DIM, seed=2)
    if needle:
        keys[17, :, 5] = 4 * queries()[0, :, 0, 0].float() * DIM**0.5
    headers, payload = KVCacheQuantizer(layout).seal(keys, keys)
    blocks, open_slot = torch.arange(PAGES), torch.full((PAGES,), -1)
    open_pages = torch.zeros(0, 2, HEADS, SIZE, DIM)
    return ContextPages(
        layout, blocks, PAGES * SIZE, open_slot, headers, payload, open_pages, softcap=softcap, dtype=dtype
    )


def queries(rows=2, samples=1, dtype=torch.float64):
    return (normal(rows, HEADS, GROUP, samples, DIM, seed=3) * DIM**-0.5).to(dtype)


def score(name, context, q=None, pages=None, base=2.0):
    q = queries() if q is None else q
    return SCORERS[name]()(q, context, torch.arange(PAGES) if pages is None else pages, q.new_full(q.shape[:-1], base))


# --- every scorer -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", SCORERS)
def test_scorer_shapes_and_rows(name, fmt):
    """Finite scores of the right shape; a row's don't depend on the rows beside it."""
    context, q = make_context(FORMATS[fmt]), queries(rows=3, samples=4)
    got = score(name, context, q)
    assert got.shape == (3, HEADS, GROUP, 4, PAGES) and got.dtype == torch.float64
    assert torch.isfinite(got).all()
    alone = torch.cat([score(name, context, q[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(got, alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in SCORERS if name != "cascade"])
def test_scorer_knows_pages_one_by_one(name):
    context, pages = make_context(), torch.tensor([3, 4, 20])
    torch.testing.assert_close(score(name, context, pages=pages), score(name, context)[..., pages])


@pytest.mark.parametrize("name", SCORERS)
def test_scorer_ranks_like_the_oracle(name):
    """Where the pages' means differ widely, every method finds most of the mass."""
    context = make_context(spread=3.0)
    share, _ = shares(score("oracle", context), queries().new_full((2, HEADS, GROUP, 1), -math.inf))
    got, best = (rank(torch.softmax(score(each, context), -1))[..., :4] for each in (name, "oracle"))
    mass = [share.sum((2, 3)).gather(-1, order).sum() for order in (got, best)]
    assert mass[0] > 0.8 * mass[1]


@pytest.mark.parametrize("name", [*SCORERS])
def test_scorer_bears_bad_queries(name):
    """NaN and infinities in one row: the other rows are unharmed, and a selection still comes out."""
    context, q = make_context(), queries()
    want = score(name, context, q)
    for bad in (float("nan"), float("inf"), 1e30):
        spoilt = q.clone()
        spoilt[0, 0, 0, 0, 0] = bad
        got = score(name, context, spoilt)
        torch.testing.assert_close(got[1], want[1])
        order, count, _ = choose(*shares(got, torch.zeros(got.shape[:-1])), SparseSettings(min_pages=2), PAGES)
        assert (order.sort(-1).values == torch.arange(PAGES)).all() and (count >= 2).all() and (count <= PAGES).all()


@pytest.mark.parametrize("name", SCORERS)
def test_scorer_of_one_page_and_of_none(name):
    context = make_context()
    assert torch.isfinite(score(name, context, pages=torch.tensor([7]))).all()
    assert score(name, context, pages=torch.arange(0)).shape[-1] == 0


@pytest.mark.parametrize("name", SCORERS)
def test_scorer_bows_to_softcap(name):
    """Logits are capped before they are summed: no estimate exceeds cap + ln n + the variance term's bound."""
    capped = score(name, make_context(spread=8.0, softcap=1.0), 5 * queries())
    free = score(name, make_context(spread=8.0), 5 * queries())
    assert capped.max() < free.max()


# --- particular scorers -----------------------------------------------------------------------------------------------


def test_oracle_is_the_truth():
    context = make_context(FORMATS["none"])
    keys, _ = context.read(torch.arange(PAGES))
    logits = torch.einsum("rhgsd,nhd->rhgsn", queries(), keys.double())
    want = torch.logsumexp(logits.reshape(*logits.shape[:-1], PAGES, SIZE), -1)
    torch.testing.assert_close(score("oracle", context), want)
    torch.testing.assert_close(score("codes", context), want)  # an unquantized page is read as it is


def test_estimate_is_exact_for_equal_keys_and_close_for_gaussian_ones():
    keys = normal(1, 1, 1, 16, seed=5).double().expand(1, 1, 64, 16)
    q = queries()[:1, :1, :, :, :16]
    mean, deviation = moments(keys)
    got, _, v = estimate_mass(q, mean, deviation, 64)
    torch.testing.assert_close(got, torch.einsum("rhgsd,nhd->rhgsn", q, mean) + math.log(64))
    assert v.max() < 1e-12
    edge = math.sqrt(2 * math.log(64))
    one = torch.ones(1, 1, 1, 1, 1, dtype=torch.float64)
    for sd in (edge - 1e-9, edge + 1e-9):  # the two branches meet
        got = estimate_mass(one * sd / 0.7**0.5, torch.zeros(1, 1, 1), torch.ones(1, 1, 1), 64)[0]
        assert got.item() == pytest.approx(2 * math.log(64), abs=1e-6)


def test_codes_are_the_top_two_bits():
    """At mid-rise of the top two bits, and within one step of the key."""
    for name in ("k4", "k8", "per token"):
        context = make_context(FORMATS[name])
        keys, step = context.two_bit_keys(torch.arange(PAGES))
        error = (keys - context.keys(torch.arange(PAGES))).abs()
        assert (error <= step / 2 + 1e-9).all()
        assert len((keys[0, 0, :, 0] if name != "per token" else keys[0, 0, 0]).unique()) <= 4


@pytest.mark.parametrize("name", ["codes", "cascade"])
def test_needle_ranks_first(name):
    """One matching key among near-random ones, which no header shows."""
    context = make_context(needle=True, spread=0.0)
    assert (rank(torch.softmax(score(name, context, 1.5 * queries()), -1))[0, :, 0] == 17).all()


def test_cascade_deepens_where_headers_are_blind():
    scorer = CascadeScorer(0.35)

    def depth(spread, q_scale):
        context = make_context(spread=spread)
        _, a, v = estimate_mass(q_scale * queries(), *context.moments(torch.arange(PAGES)), SIZE)
        return scorer.depth(a, v)

    assert (depth(0.0, 8.0) == 1.0).all()  # near-random keys
    assert depth(8.0, 8.0).flatten().tolist() == pytest.approx([0.35] * 4)  # pages of alike keys
    assert depth(0.0, 0.3).flatten().tolist() == pytest.approx([0.35] * 4)  # flat: nothing to find
    middle = depth(0.5, 2.0)
    assert (middle >= 0.35).all() and (middle <= 1.0).all()


def test_cascade_corrects_the_unread():
    """What codes find more than the headers of the same pages raises the others; it never lowers them."""
    headers, codes = normal(1, 1, 1, 1, 20).double(), normal(1, 1, 1, 1, 20, seed=1).double() + 1.0
    deep = torch.arange(20) < 7
    got = join(headers, codes, deep)
    torch.testing.assert_close(got[..., :7], codes[..., :7])
    bias = torch.logsumexp(codes[..., :7], -1) - torch.logsumexp(headers[..., :7], -1)
    torch.testing.assert_close(got[..., 7:], headers[..., 7:] + bias.clamp(min=0))
    torch.testing.assert_close(join(headers, codes - 9, deep)[..., 7:], headers[..., 7:])


@pytest.mark.parametrize(("depth", "pages"), [(0.35, 9), (0.5, 12), (1.0, 24)])
def test_cascade_reads_codes_of_the_best_only(monkeypatch, depth, pages):
    """ceil(depth * 24) pages; here both kv heads rank them alike."""
    counts, read = [], ContextPages.two_bit_keys

    def counting(self, asked):
        counts.append(len(asked))
        return read(self, asked)

    monkeypatch.setattr(ContextPages, "two_bit_keys", counting)
    monkeypatch.setattr(CascadeScorer, "depth", lambda self, a, v: torch.full((1, HEADS), depth))
    q = queries(rows=1)
    q[:, 1] = q[:, 0]
    context = make_context()
    half = context.layout.header_head_bytes
    context.headers[:, half:] = context.headers[:, :half]
    score("cascade", context, q)
    assert counts == [pages]


# --- selectors --------------------------------------------------------------------------------------------------------

SELECT = {
    "coverage": SparseSettings(coverage=0.8, min_pages=2, max_pages=10),
    "top_k": SparseSettings(select="top_k", top_k=5),
    "global_ratio": SparseSettings(select="global_ratio", global_ratio=0.1),
}


@pytest.mark.parametrize("name", SELECTORS)
def test_selector_matrix(name):
    share, rest = shares(3 * normal(4, HEADS, GROUP, 4, PAGES).double(), normal(4, HEADS, GROUP, 4, seed=1).double())
    order, count, covered = choose(share, rest, SELECT[name], context_pages=PAGES + 6)
    assert count.shape == (4, HEADS) and count.dtype == torch.int64
    assert (count >= 1).all() and (count <= PAGES).all()
    assert (covered.diff(dim=-1) >= -1e-12).all()
    torch.testing.assert_close(covered[..., -1], torch.ones_like(covered[..., -1]))
    for row in range(4):
        alone = choose(share[row : row + 1], rest[row : row + 1], SELECT[name], PAGES + 6)
        assert torch.equal(alone[0][0], order[row]) and torch.equal(alone[1][0], count[row])


def test_counts():
    share, rest = shares(torch.zeros(1, 1, 1, 1, 30, dtype=torch.float64), torch.full((1, 1, 1, 1), -math.inf))
    for settings, want in (
        (SELECT["top_k"], 5),
        (SELECT["global_ratio"], 3),  # 0.1 * 30, in spite of rounding
        (SparseSettings(coverage=0.49, min_pages=1), 15),
        (SparseSettings(coverage=0.49, min_pages=20), 20),
        (SparseSettings(coverage=0.49, min_pages=1, max_pages=4), 4),
        (SparseSettings(coverage=1.0, min_pages=1, max_pages=4), 30),
    ):
        order, count, _ = choose(share, rest, settings, context_pages=30)
        assert count.item() == want, settings
        assert torch.equal(order.flatten(), torch.arange(30))  # ties: the older page first


def test_coverage_serves_the_worst_head():
    """Head 0 is content with what is always read, head 1 needs page 2."""
    log_mass = torch.tensor([[-9.0, -9.0, -9.0], [0.0, 0.0, 9.0]]).reshape(1, 1, 2, 1, 3)
    order, count, covered = choose(*shares(log_mass, torch.zeros(1, 1, 2, 1)), SparseSettings(min_pages=1), 10)
    assert order[0, 0, 0] == 2 and count.item() == 1
    assert (covered[0, 0, :, 1] >= 0.95).all() and covered[0, 0, 1, 0] < 0.95


def test_coverage_is_monotone():
    share, rest = shares(3 * normal(4, HEADS, GROUP, 1, PAGES).double(), normal(4, HEADS, GROUP, 1, seed=1).double())
    counts = [choose(share, rest, SparseSettings(coverage=c, min_pages=1), PAGES)[1] for c in (0.3, 0.6, 0.9, 0.99, 1)]
    assert all((low <= high).all() for low, high in zip(counts, counts[1:], strict=False))
    assert (counts[-1] == PAGES).all()


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"coverage": 0.0}, "ktx.coverage=0.0: use a number above 0 and up to 1"),
        ({"coverage": 1.5}, "ktx.coverage=1.5"),
        ({"coverage": True}, "ktx.coverage=True"),
        ({"window": 0}, "ktx.window=0: use a whole number, 1 or more"),
        ({"sinks": -1}, "ktx.sinks=-1"),
        ({"share": 2}, "ktx.share=2"),
        ({"scoring": "headers"}, "did you mean 'header'"),
        ({"select": "topk"}, "did you mean 'top_k'"),
        ({"max_pages": 4}, "raise ktx.max_pages to 8"),
        ({"top_k": 5}, "set ktx.select='top_k'"),
        ({"select": "top_k"}, "a value for ktx.top_k"),
        ({"select": "global_ratio", "global_ratio": 0}, "ktx.global_ratio=0"),
    ],
)
def test_bad_settings_name_the_fix(bad, message):
    with pytest.raises(ValueError, match="^ktx") as found:
        SparseSettings(**bad)
    assert message in str(found.value)


def test_window_is_whole_pages():
    with pytest.raises(ValueError, match="ktx.window=1000 .* page size 64 .* use 1024"):
        SparseSettings(window=1000).check_page_size(64)
    SparseSettings(window=4096).check_page_size(128)


def test_candidates():
    settings = SparseSettings(window=256, sinks=64, min_pages=4)
    assert settings.candidates(256 + 64 * 6, 256 + 64 * 6, 64) == (1, 6)
    assert settings.candidates(256 + 64 * 6 - 1, 256 + 64 * 6 - 1, 64) == (1, 1)  # four: all are read
    assert settings.candidates(10, 10, 64) == (1, 1)
    assert settings.candidates(5000, 1000, 64) == (1, 15)  # far into a chunk: whole pages of the context
    assert SparseSettings(sinks=65).sink_pages(64) == 2
    assert [make_scorer(SparseSettings(scoring=name)) for name in ("header", "codes")] == [
        SCORERS["variance"](),
        SCORERS["codes"](),
    ]


def test_needs_no_vllm():
    code = "import sys; import vllm_ktx.attention_backends.sparse; assert 'vllm' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
