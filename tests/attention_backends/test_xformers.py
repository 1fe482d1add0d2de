"""Prefill by xformers: what is said where it can't be had, its join in Triton's interpreter, and itself on a GPU."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.attention_backends.cases import TOLERANCE, compare, make_batch
from tests.attention_backends.partials import Counted, local_visible, padded_visible
from tests.attention_backends.test_cpu_sparse import lists_of, oracle
from vllm_ktx.attention_backends.kernels import Heads, prefill_kernels, select_kernels
from vllm_ktx.attention_backends.selection import SparseSettings

pytest.importorskip("triton")
from tests.attention_backends.test_triton import in_the_interpreter
from vllm_ktx.attention_backends.triton import xformers_prefill
from vllm_ktx.attention_backends.triton.launch import TritonKernels
from vllm_ktx.attention_backends.triton.xformers_prefill import Functions, XformersPrefill, unavailable

HEADS = Heads(torch.bfloat16, 128, 4)


@pytest.fixture(autouse=True)
def fresh():
    unavailable.cache_clear()
    yield
    unavailable.cache_clear()


def test_join_matches_the_oracle_in_the_interpreter():
    assert in_the_interpreter(tests=[Path(__file__).with_name("test_xformers_join.py")]) >= 11


def pretend(monkeypatch, installed=True, cuda=True, functions=None):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(xformers_prefill, "xformers_functions", functions)


def fail():
    raise ImportError("Requires Flash-Attention version >=2.7.1")


@pytest.mark.parametrize(
    ("given", "heads", "reason"),
    [
        ({"installed": False}, HEADS, r"xformers is not installed \(pip install 'vllm-ktx\[xformers\]'\)"),
        ({"cuda": False}, HEADS, "torch finds no CUDA device"),
        ({"functions": fail}, HEADS, "a tiny attention failed: ImportError: Requires Flash-Attention version"),
        ({}, HEADS._replace(softcap=30.0), r"caps its logits \(at 30\)"),
    ],
)
def test_unavailable_says_why_and_names_the_setting(given, heads, reason, monkeypatch):
    pretend(monkeypatch, **given)
    with pytest.raises(RuntimeError, match=f"ktx.prefill_kernel='xformers': .*{reason}.*Set ktx.prefill_kernel to"):
        prefill_kernels("xformers", TritonKernels(), heads)


def test_other_kernels_have_no_xformers_and_auto_keeps_triton(monkeypatch):
    plain = select_kernels("torch")
    with pytest.raises(RuntimeError, match="a part of the Triton kernels, and these are torch"):
        prefill_kernels("xformers", plain, HEADS)
    ours = TritonKernels()
    assert prefill_kernels("auto", ours, HEADS) is ours and prefill_kernels("triton", plain, HEADS) is plain


def test_the_probe_runs_all_three_and_looks_at_what_comes_out():
    right = Counted()
    functions = Functions(right.local, right.listed, right.merge)
    assert xformers_prefill._attends(functions, torch.float16, 32, 3, "cpu")
    for wrong in (
        replace(functions, local=lambda q, k, v, scale, window: right.local(q, k, v, scale, window + 1)),
        replace(functions, merge=lambda outs, lses: right.merge(outs, [lses[0], lses[0]])),
    ):
        assert not xformers_prefill._attends(wrong, torch.float16, 32, 3, "cpu")


def test_masks_are_those_of_xformers():
    fmha = pytest.importorskip("xformers.ops").fmha
    real = fmha.attn_bias.LocalAttentionFromBottomRightMask(100, 0).materialize((64, 164))
    assert torch.equal(real == 0, local_visible(64, 164, 100))
    lengths, room = torch.tensor([70, 200, 90]), 200
    real = fmha.attn_bias.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
        [64] * 3, room, lengths.tolist(), device=torch.device("cpu")
    ).materialize((3 * 64, 3 * room))
    for i, visible in enumerate(padded_visible(lengths, room)):
        assert torch.equal(real[64 * i : 64 * (i + 1), room * i : room * (i + 1)] == 0, visible)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [{}, {"page_size": 96, "q_heads": 6, "kv_heads": 6, "dim": 80}])
def test_xformers_matches_the_oracle(dtype, shape):
    layout = {"page_size": 64, "q_heads": 8, "kv_heads": 2, "dim": 128, **shape}
    reason = unavailable(dtype, layout["dim"], layout["q_heads"] // layout["kv_heads"])
    if reason:
        pytest.skip(reason)
    batch = make_batch([(193, 1500), (1, 2000), (300, 40), (130, 3000)], dtype=dtype, page_spread=0.7, **layout)
    settings = SparseSettings(window=192, min_pages=2, max_pages=6, coverage=0.8)
    inputs = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in batch.inputs.items()}
    out, tokens = torch.empty_like(inputs["q"]), len(inputs["q"])
    lse = torch.empty(out.shape[:2], device="cuda")
    chosen = torch.full((tokens, layout["kv_heads"], 64), -1, dtype=torch.int32, device="cuda")
    more = {"headers": batch.headers.cuda(), "sparse": settings, "chosen": chosen, "lse": lse}
    TritonKernels(prefill=XformersPrefill()).attention(batch.layout, out=out, **more, **inputs)
    want = oracle(batch, settings, lists=lists_of(batch, settings, {"chosen": chosen.cpu()}))
    compare(out.cpu(), lse.cpu(), want.out, want.lse, 2 * TOLERANCE[dtype], "xformers")
