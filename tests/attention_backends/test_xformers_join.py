"""Prefill by xformers, with its three functions in plain torch: gathering, masks and join against the sparse oracle.

Runs in Triton's interpreter: `test_xformers.py` starts it.
"""

import os

import pytest
import torch

from tests.attention_backends import test_triton_kernels
from tests.attention_backends.cases import make_format
from tests.attention_backends.test_triton_kernels import SMALL, check, small_batch
from vllm_ktx.attention_backends.reference import merge_lse
from vllm_ktx.attention_backends.selection import SparseSettings

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1: test_xformers.py runs it", allow_module_level=True)
pytest.importorskip("triton")
from vllm_ktx.attention_backends.triton.launch import TritonKernels
from vllm_ktx.attention_backends.triton.xformers_prefill import Functions, XformersPrefill

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
torch.set_num_threads(1)


def masked(q, k, v, scale, visible):
    """Attention with xformers' layouts, `visible` `[B, M, N]`. As FlashAttention says it, a query that sees nothing
    has output 0 and lse +inf."""
    scores = torch.einsum("bmhgd,bnhgd->bhgmn", q.float(), k.float()) * scale
    scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    lse = scores.logsumexp(-1)
    weights = torch.where(visible[:, None, None], (scores - lse.unsqueeze(-1)).exp(), 0.0)
    out = torch.einsum("bhgmn,bnhgd->bmhgd", weights, torch.where(visible.any(1)[..., None, None, None], v.float(), 0))
    return out.to(q.dtype), lse.masked_fill(lse == float("-inf"), float("inf"))


def local_visible(queries, keys, window):
    """`LocalAttentionFromBottomRightMask(window, 0)`."""
    distance = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
    return (distance >= 0) & (distance <= window)


def padded_visible(lengths, room, queries=64):
    """`BlockDiagonalCausalWithOffsetPaddedKeysMask`, a sequence each."""
    seen = lengths[:, None] - queries + 1 + torch.arange(queries)
    return torch.arange(room) < seen[..., None]


class Counted:
    """The three functions, and what they were asked."""

    def __init__(self):
        self.lengths = []

    def local(self, q, k, v, scale, window):
        assert k.shape[1] == window + 64 and torch.isfinite(k[:1]).all()
        return masked(q, k, v, scale, local_visible(64, k.shape[1], window).expand(len(q), -1, -1))

    def listed(self, q, k, v, scale, lengths):
        assert q.shape[:3] == (1, 64 * len(lengths), 1) and lengths.dtype == torch.int32
        self.lengths.append(lengths.clone())
        room = k.shape[1] // len(lengths)
        assert (lengths >= 0).all() and (lengths <= room).all(), "a list is longer than its buffer"
        q, k, v = (x.reshape(len(lengths), -1, 1, *x.shape[3:]) for x in (q, k, v))
        out, lse = masked(q, k, v, scale, padded_visible(lengths, room))
        return out.reshape(1, -1, *out.shape[2:]), lse.permute(1, 2, 0, 3).reshape(1, 1, lse.shape[2], -1)

    def merge(self, outs, lses):
        assert not any((lse == float("inf")).any() for lse in lses)
        out, lse = merge_lse([x.float() for x in outs], [lse.permute(0, 3, 1, 2) for lse in lses])
        return out.contiguous(), lse.permute(0, 2, 3, 1).contiguous()


@pytest.fixture
def counted(monkeypatch):
    """Has `check` of the kernels' tests run with xformers' prefill."""
    functions = Counted()
    prefill = XformersPrefill(Functions(functions.local, functions.listed, functions.merge))
    monkeypatch.setattr(test_triton_kernels, "kernels", TritonKernels(prefill=prefill))
    return functions


@pytest.mark.parametrize(
    ("rows", "changes"),
    [
        ([(66, 330)], {}),  # one block; the two tokens behind it choose for themselves
        ([(193, 330)], {"dtype": torch.float16}),  # a chunk longer than the window: the edge reaches its own tokens
        # Decode beside; a prompt shorter than the window, and one that just reaches it: query 0 has nothing listed.
        ([(65, 417), (1, 500), (65, 40), (66, 64)], {}),
        ([(65, 503)], {"page_size": 64, "q_heads": 6, "kv_heads": 2, "dim": 80}),
        ([(65, 611)], {"page_size": 96, "q_heads": 1, "fmt": make_format(8, 8), "settings": {"window": 192}}),
        ([(65, 420)], {"fmt": make_format(4, 8, v_method="per_channel", v_rotate=False), "seal_tail": True}),
        ([(65, 330)], {"fmt": make_format(k_method="per_token", v_method="per_head"), "scoring": "header"}),
        ([(129, 300)], {"settings": {"sinks": 0, "select": "top_k", "top_k": 1}, "scattered_slots": False}),
    ],
)
def test_join_matches_the_oracle(rows, changes, counted):
    more = {"coverage": 0.8, **changes.pop("settings", {}), "scoring": changes.pop("scoring", "cascade")}
    check(small_batch(rows, **{"q_heads": 2, **changes}), SparseSettings(**{**SMALL, **more}), 0.9)
    assert counted.lengths, "xformers' functions were not called"


def test_a_wave_holds_a_unit_at_least_and_units_do_not_depend_on_it(counted, monkeypatch):
    from vllm_ktx.attention_backends.triton import xformers_prefill

    monkeypatch.setattr(xformers_prefill, "BUFFER_BYTES", 1)
    check(small_batch([(129, 330)], q_heads=2), SparseSettings(**SMALL, coverage=0.8), 0.9)
    assert [len(lengths) for lengths in counted.lengths] == [1, 1]


def test_a_window_that_no_context_exceeds_leaves_blocks_to_triton(counted):
    batch = small_batch([(70, 60)], q_heads=2)
    test_triton_kernels.run(batch, SparseSettings(window=1024))
    assert not counted.lengths
