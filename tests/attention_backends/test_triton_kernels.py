"""The Triton kernels in Triton's interpreter against the torch oracles, fp32 and fp16 (bf16 dots are wrong there).

Runs in a process of its own, with TRITON_INTERPRET=1 from the start: `test_triton.py` starts it.
"""

import os

import pytest
import torch

from tests.attention_backends.cases import GROUPS, TOLERANCE, compare, make_batch, make_format
from tests.attention_backends.test_cpu_sparse import lists_of, oracle, pages_in_common
from vllm_ktx.attention_backends.selection import SparseSettings
from vllm_ktx.kv_quant import KVCacheQuantizer, PageLayout, parse_format
from vllm_ktx.kv_quant.scale_methods import SCALE_BITS

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1: test_triton.py runs it", allow_module_level=True)
pytest.importorskip("triton")
from vllm_ktx.attention_backends.triton.launch import TritonKernels

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of masked lanes
torch.set_num_threads(1)
kernels = TritonKernels()
SMALL = {"window": 64, "sinks": 32, "min_pages": 2, "max_pages": 5}
DTYPES = [torch.float32, torch.float16]
slow = pytest.mark.slow


def seal(layout, k, v):
    """Seals `k`, `v` [n, heads, page, dim] into the last blocks of a larger, strided cache."""
    n = len(k)
    headers = torch.zeros(n + 2, layout.header_bytes + 32, dtype=torch.uint8)
    payload = torch.zeros(n + 2, layout.payload_bytes + 64, dtype=torch.uint8)
    blocks = torch.arange(2, n + 2, dtype=torch.int32).flip(0).contiguous()
    kernels.seal(layout, k, v, torch.arange(n) * k.stride(0), blocks, headers[:, : layout.header_bytes],
                 payload[:, : layout.payload_bytes], None, k.stride(2), k.stride(1))  # fmt: skip
    assert not headers[:2].any() and not payload[:2].any()
    return headers[blocks.long(), : layout.header_bytes], payload[blocks.long(), : layout.payload_bytes]


def same_header(layout, got, want):
    """Equal up to a step of the int8 code: a mean depends on the order of its sum."""
    quantizer = KVCacheQuantizer(layout)
    for ours, theirs in zip(quantizer.read_header(got), quantizer.read_header(want), strict=True):
        size = theirs.abs().amax(-1, keepdim=True)
        assert ((ours - theirs).abs() <= size / 100 + 1e-6 * (1 + size)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [(4, 8), (8, 4)])
@pytest.mark.parametrize("scale_bits", SCALE_BITS)
@pytest.mark.parametrize(
    ("methods", "shape"),
    [
        (("per_channel", "per_token"), (64, 2, 80)),
        (("per_token", "per_channel"), (96, 1, 32)),
        (("per_head", "per_head"), (32, 3, 128)),
        (("per_channel", "per_token"), (32, 1, 256)),
        (("per_channel_32", "per_token_32"), (96, 2, 96)),  # groups that the key order cuts; a padded page
        (("per_token_32", "per_channel_32"), (64, 1, 128)),
        (("per_token_32", "per_token_32"), (32, 2, 160)),
        (("per_channel_32", "per_channel_32"), (128, 1, 64)),
    ],
)
def test_sealed_bytes_equal_the_oracle(dtype, bits, methods, scale_bits, shape):
    page, heads, dim = shape
    fmt = make_format(*bits, *methods, v_rotate=methods[1] != "per_channel", scale_bits=scale_bits)
    layout = PageLayout(fmt, page, heads, dim)
    torch.manual_seed(0)
    k = torch.randn(2, heads, page, dim) * torch.linspace(0.1, 30, dim) + torch.linspace(-300, 300, dim)
    v = torch.randn(2, heads, page, dim)
    k, v = k.to(dtype), v.to(dtype)
    header, payload = seal(layout, k, v)
    want_header, want_payload = KVCacheQuantizer(layout).seal(k, v)
    assert torch.equal(payload, want_payload)
    same_header(layout, header, want_header)


@pytest.mark.parametrize("fmt", [make_format(4, 8), GROUPS[0]])
@pytest.mark.parametrize("kind", ["zero", "constant", "nan", "inf", "huge", "tiny"])
def test_special_inputs(kind, fmt):
    layout = PageLayout(fmt, 32, 2, 64, dtype_bytes=4)
    torch.manual_seed(2)
    k = torch.randn(2, 2, 32, 64)
    if kind in ("zero", "constant"):
        k = torch.full_like(k, 0.0 if kind == "zero" else -3.3)
    elif kind in ("nan", "inf"):
        k[0, 0, 3, 5] = k[1, 1, :, 7] = float("nan") if kind == "nan" else float("inf")
        k[0, 1, 2] = float("-inf") if kind == "inf" else float("nan")
    else:
        k = k * (3e38 if kind == "huge" else 1e-9)
    header, payload = seal(layout, k, k.flip(0).contiguous())
    want_header, want_payload = KVCacheQuantizer(layout).seal(k, k.flip(0))
    assert torch.equal(payload, want_payload)
    same_header(layout, header, want_header)


def test_strided_rows_unquantized_pages_and_skipped_entries():
    layout = PageLayout(parse_format("none"), 32, 2, 32, dtype_bytes=4)
    fused = torch.randn(2 * 32, 6, 32)
    pages = fused.reshape(2, 32, 6, 32).transpose(1, 2)
    _, payload = seal(layout, pages[:, 2:4], pages[:, 4:6])
    assert torch.equal(payload, KVCacheQuantizer(layout).seal(pages[:, 2:4], pages[:, 4:6])[1])
    before = payload.clone()
    nowhere = torch.full((2,), -1, dtype=torch.int32)
    kernels.seal(layout, fused, fused, torch.zeros(2, dtype=torch.int64), nowhere, payload, payload, None, 192, 32)
    assert torch.equal(payload, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_append(dtype):
    layout = PageLayout(parse_format("k4v4"), 32, 3, 48)
    fused = torch.randn(12, 3, 3, 48).to(dtype)
    k, v = fused[:, 1], fused[:, 2]
    open_pages = torch.zeros(4, 2, 3, 32, 48, dtype=dtype)
    token, place = (torch.randperm(7) + 5).int(), torch.randperm(4 * 32)[:7]
    slot, offset = (place // 32).int(), (place % 32).int()
    slot[3] = -1
    kernels.append(layout, k, v, token, slot, offset, open_pages)
    want = torch.zeros_like(open_pages)
    kept = slot >= 0
    where = (slot[kept].long(), slice(None), slice(None), offset[kept].long())
    want[where] = torch.stack((k[token[kept].long()], v[token[kept].long()]), 1)
    assert torch.equal(open_pages, want)


def test_numbers_at_the_ends_of_fp16_stay_finite():
    """Restored, some lie half a step beyond what fp16 holds."""
    fmt = make_format(4, 4, "per_token_32", "per_token_32", v_rotate=False)
    batch = make_batch([(1, 128)], fmt, 32, 2, 1, 64, torch.float16, seal_tail=True, scattered_slots=False)
    x = torch.where(torch.rand(len(batch.inputs["payload"]), 1, 32, 64) < 0.5, -65504.0, 63000.0)
    x += 2500 * torch.rand_like(x)
    batch.inputs["payload"][:] = KVCacheQuantizer(batch.layout).seal(x, x)[1]
    assert KVCacheQuantizer(batch.layout).unseal(batch.inputs["payload"])[0].half().isinf().any()
    out, lse = batch.run(kernels, q=batch.inputs["q"] * 1e-4)
    assert out.isfinite().all() and lse.isfinite().all()


FORMATS = [
    {},
    {"k_bits": 8, "v_bits": 8},
    {"k_method": "per_token", "v_method": "per_channel", "v_rotate": False},
    {"k_method": "per_head", "v_method": "per_head", "k_bits": 8},
    {"k_bits": 16, "v_bits": 16},
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale_bits", SCALE_BITS)
@pytest.mark.parametrize(
    ("k_method", "v_method", "shape"),
    [
        ("per_channel_32", "per_token", (64, 8, 1, 64)),
        ("per_token_32", "per_channel_32", (128, 3, 1, 96)),
        ("per_channel", "per_token_32", (96, 2, 2, 64)),
        ("per_token", "per_head", (32, 2, 1, 80)),
        pytest.param("per_channel_32", "per_token_32", (64, 2, 1, 256), marks=slow),
        pytest.param("per_token_32", "per_token_32", (128, 4, 1, 128), marks=slow),
        pytest.param("per_head", "per_channel", (96, 6, 2, 80), marks=slow),
    ],
)
def test_scale_methods(k_method, v_method, shape, scale_bits, dtype):
    fmt = make_format(8, 4, k_method, v_method, v_rotate=scale_bits == 16, scale_bits=scale_bits)
    make_batch([(1, 2 * shape[0] + 75), (3, shape[0] + 64)], fmt, *shape, dtype).check(kernels)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_dense(fmt, dtype):
    rows = [(1, 75), (1, 0), (0, 40), (5, 64)]
    batch = make_batch(rows, make_format(**fmt), page_size=32, q_heads=3, kv_heads=1, dim=32, dtype=dtype)
    batch.check(kernels)


@pytest.mark.parametrize(
    ("page_size", "q_heads", "kv_heads", "dim", "softcap"),
    [
        (64, 4, 4, 16, 0.0),
        (96, 2, 1, 64, 3.0),
        (32, 7, 1, 80, 0.0),
        pytest.param(128, 6, 2, 96, 0.0, marks=slow),
        pytest.param(256, 8, 2, 128, 0.0, marks=slow),
        pytest.param(64, 2, 1, 256, 5.0, marks=slow),
    ],
)
def test_dense_shapes(page_size, q_heads, kv_heads, dim, softcap):
    rows = [(1, 2 * page_size + 3), (2, page_size)]
    batch = make_batch(
        rows, make_format(4, 8), page_size, q_heads, kv_heads, dim, torch.float32, softcap, scattered_slots=dim > 16
    )
    batch.check(kernels)


def test_context_alone_and_a_long_prompt():
    batch = make_batch([(1, 70), (67, 0)], page_size=32, q_heads=2, kv_heads=1, dim=32, dtype=torch.float32)
    batch.check(kernels)
    batch.check(kernels, k=None, v=None)


def run(batch, settings, **changes):
    tokens, heads = len(batch.inputs["q"]), batch.layout.num_kv_heads
    extra = {
        "dropped": torch.full((tokens, heads), -1.0),
        "depth": torch.full((tokens, heads), -1.0),
        "pages_read": torch.full((tokens, heads), -1, dtype=torch.int32),
        "chosen": torch.full((tokens, heads, 64), -1, dtype=torch.int32),
    }
    out, lse = batch.run(kernels, sparse=settings, headers=batch.headers, **extra, **changes)
    return out, lse, extra


def check(batch, settings, same_choice=1.0):
    """Choice, output and account against the oracle, which attends the kernels' choice where it differs."""
    want = oracle(batch, settings)
    out, lse, extra = run(batch, settings)
    lists = lists_of(batch, settings, extra)
    assert extra["pages_read"].tolist() == [[len(h) for h in token] for token in lists]
    hits, total = pages_in_common(lists, want.lists)
    assert hits >= same_choice * total, f"{hits} of {total} pages as the oracle chose"
    given = want if hits == total else oracle(batch, settings, lists=lists)
    compare(out, lse, given.out, given.lse, TOLERANCE[out.dtype], str(settings))
    assert (extra["dropped"].double() - want.dropped).abs().max() < 0.03
    assert (extra["chosen"] >= 0).any(), "the batch leaves nothing to choose"
    return extra


def small_batch(rows, **changes):
    shape = {"page_size": 32, "q_heads": 3, "kv_heads": 1, "dim": 32, "dtype": torch.float32, "page_spread": 0.7}
    return make_batch(rows, **{**shape, **changes})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scoring", ["header", "cascade", "codes"])
def test_sparse_decode(scoring, dtype):
    batch = small_batch([(1, 500), (0, 100), (1, 416), (1, 60)], dtype=dtype)
    extra = check(batch, SparseSettings(**SMALL, scoring=scoring, coverage=0.8), 1.0 if dtype == torch.float32 else 0.9)
    assert extra["pages_read"][2].tolist() == [2], "a short context is read whole"
    least, most = {"header": (0, 0), "cascade": (0.35, 1), "codes": (1, 1)}[scoring]
    assert least <= extra["depth"][0, 0] <= most and extra["depth"][2, 0] == 0


@pytest.mark.parametrize("fmt", [make_format(), make_format(8, 8), make_format(k_method="per_token"), *GROUPS[::3]])
def test_sparse_prefill(fmt):
    scoring = "cascade" if fmt.keys_by_channel else "header"
    shape = {"page_size": 64, "dim": 64} if fmt in GROUPS else {}
    batch = small_batch([(66, 330)], fmt=fmt, q_heads=2, **shape)
    check(batch, SparseSettings(**SMALL, scoring=scoring, coverage=0.8), 0.95)


@pytest.mark.parametrize("fmt", [*GROUPS[::2], make_format(8, 4, scale_bits=8)])
def test_two_bit_scoring_by_scale_method(fmt):
    batch = small_batch([(1, 960), (1, 700)], fmt=fmt, page_size=64, dim=64, uneven=4.0)
    check(batch, SparseSettings(**SMALL, scoring="codes", select="top_k", top_k=4))


@pytest.mark.parametrize(
    "more", [{"select": "top_k", "top_k": 3}, {"select": "global_ratio", "global_ratio": 0.2}, {"coverage": 0.999}]
)
def test_selectors(more):
    check(small_batch([(1, 400)], q_heads=2), SparseSettings(**SMALL, **more))


@slow
@pytest.mark.parametrize("rows", [[(140, 700)], [(65, 500), (1, 600), (64, 64 * 8)], [(160, 63), (130, 500)]])
@pytest.mark.parametrize("shape", [{}, {"page_size": 64, "q_heads": 6, "kv_heads": 2, "dim": 64}, {"softcap": 4.0}])
def test_sparse_mixed_batches(rows, shape):
    check(small_batch(rows, **shape), SparseSettings(**SMALL, coverage=0.8), 0.95)


@slow
@pytest.mark.parametrize(("q_heads", "kv_heads", "dim"), [(4, 1, 128), (14, 2, 80), (9, 3, 96), (2, 2, 256)])
def test_sparse_shapes(q_heads, kv_heads, dim):
    batch = small_batch([(1, 500), (2, 416)], q_heads=q_heads, kv_heads=kv_heads, dim=dim, page_size=32)
    check(batch, SparseSettings(**SMALL, coverage=0.8), 0.95)


def test_equal_ranks_go_to_the_lower_page():
    """Copies of one page rank alike: the first are taken."""
    batch = small_batch([(1, 32 * 14)], q_heads=1)
    inputs, table = batch.inputs, batch.inputs["block_table"][0, :14].long()
    batch.headers[table[1:]] = batch.headers[table[1]].clone()
    slots = inputs["payload_slot"][table].long()
    inputs["payload"][slots[1:]] = inputs["payload"][slots[1]].clone()
    extra = check(batch, SparseSettings(**SMALL, select="top_k", top_k=3))
    assert extra["chosen"][0, 0, :4].tolist() == [1, 2, 3, -1]


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
@pytest.mark.parametrize("rows", [[(1, 400), (0, 40), (1, 60)], [(66, 330)]])
def test_workspaces_may_hold_anything(monkeypatch, rows, byte):
    """On a card they hold what other kernels left: NaN, and indices out of bounds."""
    batch, settings, empty = small_batch(rows, q_heads=2), SparseSettings(**SMALL, coverage=0.8), torch.empty
    want, want_lse, want_extra = run(batch, settings)
    filled = lambda *size, **kind: empty(*size, **kind).view(torch.uint8).fill_(byte).view(kind["dtype"])  # noqa: E731
    monkeypatch.setattr(torch, "empty", filled)
    out, lse, extra = run(batch, settings)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
    assert all(torch.equal(extra[name], x) for name, x in want_extra.items())


def test_coverage_one_is_dense():
    batch = small_batch([(1, 300), (3, 200)])
    out, lse, extra = run(batch, SparseSettings(**SMALL, coverage=1.0))
    want, want_lse = batch.expected()
    compare(out, lse, want, want_lse, TOLERANCE[out.dtype], "coverage 1")
    assert (extra["dropped"] == 0).all() and (extra["depth"] == 0).all()
    assert extra["pages_read"].tolist() == [[10], [7], [7], [7]]


def test_a_row_is_bitwise_the_same_alone_and_in_any_batch():
    batch = small_batch([(1, 200), (1, 170)], q_heads=1)
    settings = SparseSettings(**SMALL, coverage=0.9)
    together = run(batch, settings)[0]
    for row in range(2):
        begin, end = batch.inputs["cu_q"][row : row + 2].tolist()
        changes = {name: batch.inputs[name][begin:end] for name in ("q", "k", "v")}
        changes |= {name: batch.inputs[name][row : row + 1] for name in ("context", "block_table")}
        changes["cu_q"] = torch.tensor([0, end - begin], dtype=torch.int32)
        alone = torch.empty_like(changes["q"])
        inputs = {**batch.inputs, **changes}
        kernels.attention(batch.layout, out=alone, headers=batch.headers, sparse=settings, **inputs)
        assert torch.equal(alone, together[begin:end])


def test_a_query_that_is_not_finite_harms_no_other():
    batch = small_batch([(1, 200), (1, 190)], q_heads=2)
    settings = SparseSettings(**SMALL)
    clean = run(batch, settings)[0]
    batch.inputs["q"] = batch.inputs["q"].clone()
    batch.inputs["q"][0, 0, 5], batch.inputs["q"][0, 1, 5] = float("nan"), float("inf")
    assert torch.equal(run(batch, settings)[0][1], clean[1])


def test_what_can_not_be_served_is_said():
    batch = small_batch([(1, 300)], fmt=make_format(k_method="per_token"))
    with pytest.raises(ValueError, match="use scoring 'header'"):
        run(batch, SparseSettings(window=64))
    with pytest.raises(ValueError, match="needs headers"):
        batch.run(kernels, sparse=SparseSettings(window=64))


def test_the_benchmark_checks_what_it_times_and_its_steps_run(monkeypatch):
    """`benchmarks.gpu` on the CPU, as far as it goes: all but the clock."""
    from benchmarks import gpu
    from benchmarks.problem import Shape, make_problem

    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    monkeypatch.setattr(gpu, "DTYPE", torch.float32)
    shape, settings = Shape("tiny", 2, 1, 32), SparseSettings(64, min_pages=2)
    found = gpu.correctness("cpu", shape, 700, 1, settings)
    assert found["dense"] < 2e-5 and found["sparse"] < 2e-5 and found["dropped"] < 0.03 and found["pages"] == 0
    problem = make_problem(shape, "k4v4", 300, 1)
    used = gpu.account(problem, "cpu")
    steps = [*gpu.ktx_steps(problem, settings, used).values(), gpu.plain_step(problem)]
    for call in (*steps, *gpu.bf16_baselines(problem).values()):
        call()
    assert used["pages_read"].item() >= 2
    for call, pages in gpu.paged_steps(problem, settings).values():
        call()
        assert pages.counts.sum() >= 2
        assert bool(pages.counts[2]) == (len(pages.slots) == 1), "one slot: the others are read in place"
    call, moved = gpu.fetch_all(pages)
    call()
    assert moved == problem.layout.payload_bytes and torch.equal(pages.slots[0], pages.host[pages.block_of[0].long()])
    longer = make_problem(shape, "k4v4", 100, 8)
    assert gpu.bf16_baselines(longer)["sdpa"]().shape == (1, 2, 8, 32)


def test_the_benchmark_says_what_its_checks_of_a_format_find(monkeypatch):
    from benchmarks import gpu

    monkeypatch.setattr(gpu, "CHECKED", (("none", 32, 32),))
    monkeypatch.setattr(gpu.TritonKernels, "append", lambda *args: None)
    assert "appending is off" in gpu.checks("cpu", torch.float16)["none 32 pages of 32"]["error"]
