"""The native attention of rows with several queries against the float64 oracle, for every instruction set."""

import itertools

import pytest
import torch

from tests.attention_backends.cases import GROUPS, compare, make_batch, make_format
from vllm_ktx.attention_backends.cpu import native
from vllm_ktx.kv_quant.scale_methods import SCALE_BITS, SCALE_METHODS

kernels = native.load()
if kernels is None:
    pytest.skip("the native CPU kernels are not built", allow_module_level=True)

ISAS = kernels.available_isas()
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def settings():
    """One thread for the oracle's small products (the kernels are told theirs), and the ISA as it was."""
    threads, isa = torch.get_num_threads(), kernels.isa
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    kernels.set_isa(isa)


def check(batch, **changes):
    batch.check(kernels, ISAS, **changes)


@pytest.fixture(params=ISAS)
def cpu(request):
    kernels.set_isa(request.param)
    return kernels


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [(4, 4), (8, 4), (4, 8), (8, 8), (16, 16)])
def test_bits(bits, dtype):
    check(make_batch([(37, 300), (70, 129)], make_format(*bits), dtype=dtype))


@pytest.mark.parametrize("scale_bits", SCALE_BITS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scale_methods(bits, scale_bits, dtype):
    # Without an offset in the keys: scales that channels share have no middle to store keys relative to.
    for i, methods in enumerate(itertools.product(SCALE_METHODS, SCALE_METHODS)):
        fmt = make_format(bits, bits, *methods, i % 2 == 0, scale_bits)
        check(make_batch([(11, 150)], fmt, dtype=dtype, offset=0.0))


@pytest.mark.parametrize("fmt", GROUPS)
@pytest.mark.parametrize(("page_size", "dim"), [(32, 128), (96, 64), (128, 96), (256, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_of_32(fmt, page_size, dim, dtype):
    rows = [(9, 32), (9, 333), (20, 1), (33, 128), (5, 255)]
    more = {} if fmt.keys_by_channel else {"offset": 0.0}
    check(make_batch(rows, fmt, page_size, q_heads=3, kv_heads=1, dim=dim, dtype=dtype, seal_tail=True, **more))


@pytest.mark.parametrize("heads", [(14, 2), (32, 8), (9, 3), (16, 1), (4, 4), (12, 1)])
@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 256])
def test_shapes(heads, dim):
    check(make_batch([(19, 140)], q_heads=heads[0], kv_heads=heads[1], dim=dim))


@pytest.mark.parametrize("page_size", [32, 64, 96, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seal_tail", [False, True])
def test_page_sizes(page_size, dtype, seal_tail):
    rows = [(9, 32), (9, 333), (20, 1), (33, 128), (5, 255)]
    check(make_batch(rows, page_size=page_size, dtype=dtype, seal_tail=seal_tail))


@pytest.mark.parametrize("dtype", DTYPES)
def test_fresh_rows_alone(dtype):
    """No context: the first chunk of a prompt, over several blocks of queries and tiles of keys."""
    check(make_batch([(333, 0), (64, 0), (65, 0), (2, 0)], dtype=dtype))


def test_long_chunk_behind_context():
    check(make_batch([(300, 1000)], q_heads=4, kv_heads=2))


def test_context_only():
    batch = make_batch([(40, 200), (9, 0)])
    check(batch, k=None, v=None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_softcap(dtype):
    check(make_batch([(37, 300)], softcap=2.5, dtype=dtype))


def test_unrotated_values():
    check(make_batch([(37, 300)], make_format(v_rotate=False)))


def test_large_key_offsets():
    """Keys with a bias of hundreds (Qwen2.5) keep their range in every dtype that they pass through."""
    batch = make_batch([(37, 300)], make_format(8, 8), offset=100.0, extra_open=0, dtype=torch.bfloat16)
    check(batch, q=batch.inputs["q"] * 0.25)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
def test_uneven_channels_and_tokens(bits, dtype):
    """Large channels and tokens take no precision from small ones that weigh as much."""
    check(make_batch([(37, 300)], make_format(bits, bits), dtype=dtype, uneven=30.0, page_spread=1.0))


def test_payload_slot_defaults_to_block():
    check(make_batch([(10, 200)], scattered_slots=False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bitwise_whatever_else_runs(cpu, dtype):
    """The same bits alone, in a batch, on any number of threads."""
    batch = make_batch([(200, 300), (37, 129), (1, 80)], dtype=dtype)
    out, lse = batch.run(cpu, num_threads=1)
    for threads in (2, 3):
        again, again_lse = batch.run(cpu, num_threads=threads)
        assert torch.equal(again, out) and torch.equal(again_lse, lse)
    one = {name: batch.inputs[name][200:237] for name in ("q", "k", "v")}
    one |= {"cu_q": torch.tensor([0, 37], dtype=torch.int32), "context": batch.inputs["context"][1:2]}
    alone, alone_lse = batch.run(cpu, block_table=batch.inputs["block_table"][1:2], **one)
    assert torch.equal(alone, out[200:237]) and torch.equal(alone_lse, lse[200:237])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_fresh_token_stays_with_those_who_see_it(cpu, dtype, value):
    batch = make_batch([(90, 100), (40, 70)], dtype=dtype)
    want, _ = batch.expected()
    for name in ("k", "v"):
        changed = batch.inputs[name].clone()
        changed[77] = value
        out, _ = batch.run(cpu, **{name: changed})
        assert (~torch.isfinite(out[77:90])).any(dim=-1).all()
        kept = torch.cat((out[:77], out[90:])).double() - torch.cat((want[:77], want[90:]))
        assert kept.abs().max() < 0.05


def test_bad_query_stays_alone(cpu):
    batch = make_batch([(40, 100)])
    q = batch.inputs["q"].clone()
    q[5, 3] = float("nan")
    out, lse = batch.run(cpu, q=q)
    want, want_lse = batch.run(cpu)
    assert torch.isnan(out[5, 3]).all() and torch.isnan(lse[5, 3])
    out[5, 3], lse[5, 3] = want[5, 3], want_lse[5, 3]
    assert torch.equal(out, want) and torch.equal(lse, want_lse)


@pytest.mark.parametrize("dim", [16, 48, 80, 112])
def test_scratch_of_earlier_calls_is_not_read(cpu, dim):
    """NaN keys and values of a wide model stay behind in this thread's buffers."""
    wide = make_batch([(70, 700)], q_heads=8, kv_heads=1, dim=256)
    batch = make_batch([(70, 700), (40, 4095)], q_heads=8, kv_heads=1, dim=dim, page_size=32)
    nan = torch.full_like(wide.inputs["k"], float("nan"))
    out, _ = wide.run(cpu, num_threads=1, k=nan, v=nan)
    assert out.isnan().all()
    compare(*batch.run(cpu, num_threads=1), *batch.expected(), 6e-3, "after NaN")
