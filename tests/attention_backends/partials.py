"""xformers' three functions in plain torch: the layouts and the masks that `xformers_prefill.Functions` asks for."""

import torch

from vllm_ktx.attention_backends.reference import merge_lse


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
        assert torch.isfinite(k[:1]).all(), "the first unit's buffer has gaps"
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
