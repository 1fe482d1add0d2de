"""Dense attention over KTX pages in plain torch, written to be read: the oracle that every kernel is tested against.

Owns the meaning of the kernels' arguments (`AttentionArgs` in `cpu/csrc/ktx.h`): which tokens a row sees, where a page
is read from, what the log-sum-exp is. Never fast, never bounded in memory: it materialises whole score matrices.
Imports torch and `kv_quant` only.
"""

from __future__ import annotations

import torch

from vllm_ktx.kv_quant import KVCacheQuantizer, PageLayout


def gather_context(
    layout: PageLayout,
    blocks: torch.Tensor,
    length: int,
    open_slot: torch.Tensor,
    payload: torch.Tensor,
    open_pages: torch.Tensor,
    payload_slot: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the first `length` tokens in pages `blocks`, float32 `[length, num_kv_heads, head_dim]`.

    A page comes from `open_pages` (model dtype, `[num_open, 2, num_kv_heads, page_size, head_dim]`) where
    `open_slot[block] >= 0`, else from its payload.
    """
    shape = (0, layout.num_kv_heads, layout.head_dim)
    num_pages = -(-length // layout.page_size)
    if num_pages == 0:
        return torch.zeros(shape), torch.zeros(shape)
    blocks = blocks[:num_pages].long()
    slots = blocks if payload_slot is None else payload_slot[blocks].long()
    where = open_slot[blocks].long()
    sealed = where < 0
    pages = torch.zeros(num_pages, 2, layout.num_kv_heads, layout.page_size, layout.head_dim)
    if sealed.any():
        keys, values = KVCacheQuantizer(layout).unseal(payload[slots[sealed]], open_pages.dtype)
        pages[sealed] = torch.stack((keys, values), dim=1)
    if not sealed.all():
        pages[~sealed] = open_pages[where[~sealed]].float()
    flat = pages.permute(1, 0, 3, 2, 4).reshape(2, -1, layout.num_kv_heads, layout.head_dim)
    return flat[0, :length], flat[1, :length]


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    softcap: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of `q` `[tokens, num_q_heads, D]` over `keys`, `values` `[n, num_kv_heads, D]`, in `dtype`.

    Query t sees the first `visible[t]` keys. Query head h reads kv head `h // (num_q_heads // num_kv_heads)`. Returns
    the output `[tokens, num_q_heads, D]` and the natural log-sum-exp `[tokens, num_q_heads]`; a query that sees nothing
    gets zeros and -inf.
    """
    group = q.shape[1] // max(keys.shape[1], 1)
    hidden = torch.arange(len(keys)) >= visible.reshape(-1, 1)
    out = torch.empty(q.shape, dtype=dtype)
    lse = torch.empty(q.shape[:2], dtype=dtype)
    for head in range(q.shape[1]):  # one head at a time: a score matrix of a long context is large enough
        logits = q[:, head].to(dtype) @ keys[:, head // group].to(dtype).T * scale
        if softcap > 0:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits.masked_fill(hidden, float("-inf"))
        lse[:, head] = torch.logsumexp(logits, dim=-1)
        weights = torch.exp(logits - lse[:, head, None]).masked_fill(hidden, 0.0)
        out[:, head] = _weighted_sum(weights, values[:, head // group].to(dtype), hidden)
    return out, lse


def _weighted_sum(weights: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """`weights @ values` in which a hidden NaN or infinity stays hidden (0 * NaN is NaN)."""
    bad = ~torch.isfinite(values).all(dim=-1)
    if not bad.any():
        return weights @ values
    out = weights[:, ~bad] @ values[~bad]
    for index in bad.nonzero().flatten().tolist():
        seen = ~hidden[:, index]
        out[seen] += weights[seen, index, None] * values[index]
    return out


def attention(
    layout: PageLayout,
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    cu_q: torch.Tensor,
    context: torch.Tensor,
    block_table: torch.Tensor,
    open_slot: torch.Tensor,
    payload: torch.Tensor,
    open_pages: torch.Tensor,
    scale: float,
    softcap: float = 0.0,
    payload_slot: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of a mixed batch.

    Row r has the queries `q[cu_q[r] : cu_q[r + 1]]` (`[tokens, num_q_heads, D]`), whose own keys and values are the
    same rows of `k` and `v` (`[tokens, num_kv_heads, D]`; None: the row sees its context only), behind `context[r]`
    older tokens in pages `block_table[r, 0 ..]`. `payload`: uint8 `[num_slots, payload_bytes]`.

    Returns the output `[tokens, num_q_heads, D]` and the log-sum-exp `[tokens, num_q_heads]`, both in `dtype`.
    """
    out = torch.zeros(q.shape, dtype=dtype)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=dtype)
    for row, length in enumerate(context.tolist()):
        begin, end = int(cu_q[row]), int(cu_q[row + 1])
        keys, values = gather_context(layout, block_table[row], length, open_slot, payload, open_pages, payload_slot)
        visible = torch.full((end - begin,), length)
        if k is not None and v is not None:
            keys, values = torch.cat((keys, k[begin:end].float())), torch.cat((values, v[begin:end].float()))
            visible = visible + torch.arange(1, end - begin + 1)
        out[begin:end], lse[begin:end] = attend(q[begin:end], keys, values, visible, scale, softcap, dtype)
    return out, lse


def merge_lse(outs: list[torch.Tensor], lses: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Joins attention over disjoint sets of keys: outputs `[..., D]` and natural log-sum-exps `[...]` into one of each.

    A part that saw nothing (-inf) has no weight; where no part saw anything the result is zeros and -inf.
    """
    stacked = torch.stack(lses)
    total = torch.logsumexp(stacked, dim=0)
    weights = torch.where(torch.isneginf(stacked), torch.zeros_like(stacked), torch.exp(stacked - total))
    parts = torch.where(weights.unsqueeze(-1) > 0, torch.stack(outs), torch.zeros_like(outs[0]))
    return (weights.unsqueeze(-1) * parts).sum(dim=0), total
