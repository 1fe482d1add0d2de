"""The oracle itself, against torch's own attention and against arithmetic done by hand."""

import subprocess
import sys

import pytest
import torch

from tests.attention_backends.cases import make_batch, make_format
from vllm_ktx.attention_backends import reference


def test_attend_matches_torch():
    torch.manual_seed(0)
    q, k, v = torch.randn(7, 6, 32), torch.randn(20, 2, 32), torch.randn(20, 2, 32)
    visible = torch.arange(14, 21)
    out, lse = reference.attend(q, k, v, visible, 0.3)
    mask = torch.arange(20) < visible.reshape(-1, 1)
    q64, k64, v64 = (x.double().transpose(0, 1) for x in (q, k, v))
    want = torch.nn.functional.scaled_dot_product_attention(
        q64, k64.repeat_interleave(3, 0), v64.repeat_interleave(3, 0), attn_mask=mask, scale=0.3
    )
    torch.testing.assert_close(out, want.transpose(0, 1))
    logits = (q64 @ k64.repeat_interleave(3, 0).mT * 0.3).masked_fill(~mask, float("-inf"))
    torch.testing.assert_close(lse, logits.logsumexp(-1).T)


def test_softcap_bounds_logits():
    q, k = torch.full((1, 1, 16), 100.0), torch.full((1, 1, 16), 100.0)
    _, lse = reference.attend(q, k, torch.ones(1, 1, 16), torch.tensor([1]), 1.0, softcap=5.0)
    assert lse.item() == pytest.approx(5.0)


def test_hidden_nan_stays_hidden():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 16), torch.randn(3, 1, 16), torch.randn(3, 1, 16)
    k[2], v[2] = float("nan"), float("nan")
    out, lse = reference.attend(q, k, v, torch.tensor([1, 2, 3]), 1.0)
    assert torch.isfinite(out[:2]).all() and torch.isfinite(lse[:2]).all()
    assert torch.isnan(out[2]).all()


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_pages_read_back(bits):
    """Attention over pages is attention over the tokens that they read back as, wherever they lie."""
    batch = make_batch([(3, 200), (1, 0), (5, 64)], make_format(bits, bits), dtype=torch.float32)
    out, lse = batch.expected()
    kept = ("open_slot", "payload", "open_pages", "payload_slot")
    where = {name: batch.inputs[name] for name in kept}
    keys, values = reference.gather_context(batch.layout, batch.inputs["block_table"][0], 200, **where)
    assert keys.shape == (200, 2, 64)
    keys, values = torch.cat((keys, batch.inputs["k"][:3])), torch.cat((values, batch.inputs["v"][:3]))
    want, want_lse = reference.attend(batch.inputs["q"][:3], keys, values, torch.tensor([201, 202, 203]), 64**-0.5)
    torch.testing.assert_close(out[:3], want)
    torch.testing.assert_close(lse[:3], want_lse)
    own = batch.inputs["v"][3].double()  # a first token sees itself alone
    torch.testing.assert_close(out[3], own.repeat_interleave(4, 0))


def test_context_only_and_nothing_at_all():
    batch = make_batch([(2, 70), (2, 0)], dtype=torch.float32)
    out, lse = batch.expected(k=None, v=None)
    assert torch.isfinite(lse[:2]).all()
    assert (out[2:] == 0).all() and torch.isneginf(lse[2:]).all()


def test_merge_lse_joins_disjoint_parts():
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 32), torch.randn(30, 2, 32), torch.randn(30, 2, 32)
    whole, lse = reference.attend(q, k, v, torch.tensor([30, 30]), 0.2)
    spans = ((0, 11), (11, 11), (11, 30))
    parts = [reference.attend(q, k[a:b], v[a:b], torch.tensor([b - a] * 2), 0.2) for a, b in spans]
    out, total = reference.merge_lse([part[0] for part in parts], [part[1] for part in parts])
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(total, lse)


def test_merge_lse_of_nothing():
    out, lse = reference.merge_lse([torch.full((1, 4), float("nan"))] * 2, [torch.tensor([float("-inf")])] * 2)
    assert (out == 0).all() and torch.isneginf(lse).all()


def test_needs_no_vllm():
    code = "import sys; import vllm_ktx.attention_backends.reference; assert 'vllm' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
