"""The row to beat: vLLM's own `int4_per_token_head` cache, simulated in float32 on transformers.

vLLM serves that cache through Triton on GPUs only, so the rule is replayed here on any machine, as vLLM 0.32 states it
in `v1/attention/ops/int4_per_token_head.py`: keys (after RoPE) and values are turned by a randomized Hadamard transform
(vLLM's own function is called), then quantized per token and head to 4 bits, with an integer zero point in 0..15 and a
float32 scale whose four low mantissa bits hold it. Every token, a query's own too, is read back from codes. What the
GPU adds to that, bf16 rounding of the rotation, is left out: the simulation flatters the original slightly.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from benchmarks.engine import TOP, Scores

RULES = ("int4_per_token_head",)


def int4_per_token_head(x: torch.Tensor) -> torch.Tensor:
    """`x` float32 `[..., head_dim]` as the cache reads it back; one scale and zero point for each last dimension."""
    from vllm.v1.attention.ops.int4_per_token_head import single_rht

    rotated = single_rht(x.contiguous())
    low, high = rotated.amin(-1, keepdim=True), rotated.amax(-1, keepdim=True)
    scale = ((high - low) / 15).clamp(min=1e-6)
    zero = _round(-low / scale).clamp(0, 15)
    codes = _round(rotated * (1 / scale) + zero).clamp(0, 15)
    stored = (scale.view(torch.int32) & -16).view(torch.float32)
    size = x.shape[-1] & -x.shape[-1]  # the rotation's block: its transform is not normalized
    return single_rht((codes - zero) * stored, inverse=True) / size


def _round(x: torch.Tensor) -> torch.Tensor:
    """Half away from zero, as the kernel does."""
    return torch.where(x >= 0, (x + 0.5).floor(), (x - 0.5).ceil())


def _attention(module, query, key, value, attention_mask, scaling=None, **options):
    """transformers' attention interface; `key`, `value` `[batch, kv_heads, tokens, head_dim]` go through codes."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    key, value = int4_per_token_head(key), int4_per_token_head(value)
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)


@torch.inference_mode()
def simulate(folder: str, texts: Sequence[list[int]], rule: str | None = RULES[0]) -> list[Scores]:
    """Scores of each text; `rule=None` is the plain model. One pass a text is exact: no token is read unquantized."""
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
    from transformers.masking_utils import sdpa_mask

    attention = "sdpa"
    if rule is not None:
        attention = rule
        AttentionInterface.register(rule, _attention)
        AttentionMaskInterface.register(rule, sdpa_mask)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention).eval()
    return list(_scores(model, texts))


def _scores(model, texts: Iterable[list[int]], rows: int = 512) -> Iterable[Scores]:
    for ids in texts:
        hidden = model.model(torch.tensor([ids])).last_hidden_state[0, :-1]
        target = torch.tensor(ids[1:]).unsqueeze(1)
        parts = []
        for begin in range(0, len(hidden), rows):  # the logits of a whole text would take gigabytes
            logprobs = model.lm_head(hidden[begin : begin + rows]).float().log_softmax(-1)
            top = logprobs.topk(TOP)
            nll = -logprobs.gather(1, target[begin : begin + rows])[:, 0]
            parts.append((nll.double(), top.indices, top.values.double()))
        yield Scores(*(torch.cat(part).numpy() for part in zip(*parts, strict=True)))
