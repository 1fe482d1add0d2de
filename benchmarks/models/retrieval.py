"""A two-layer Llama whose weights are computed, not trained, and that recalls exactly at any length.

Given records "k1 k2 v" anywhere in the context and a query "k1 k2" at its end, the next token is v. It is a plain
LlamaForCausalLM, so every engine runs it, and an attention backend that loses or mixes up one page gets a wrong answer.

How it works. Every token has a code: a unit vector e(token), far from all others. The residual stream holds five
fields: [ e(t) | e(t-1) | e(t-2) | answer | 1 ].
- Layer 0 fills the second and third. Its queries and keys are constants, so that RoPE makes the score a function of
  distance alone: sum_j w_j cos(f_j (x - d)), with the weights w chosen to make x = d stand out from every other
  distance up to max_positions. One query head has d = 1, one d = 2; the values are codes.
- Layer 1 looks up. Its query is (e(t), e(t-1)), its key (e(p-1), e(p-2)), its value e(p): the best match is the token
  that followed the same two tokens before. Content must not turn with position, so it uses only the RoPE pairs that
  turn less than `SLOW_TURN` over the whole context; a very large theta makes most pairs so.
- The MLPs are zero, and lm_head compares the answer field with every code.

Margins. `pos_margin` and `match_margin` are the logit gaps between the right position and the best wrong one. At about
30, every wrong position together weighs nothing even in 131072 tokens: the model catches lost pages and forgives
rounding. Lower margins mix wrong positions into the answer, and the more so the less exact the scores are.
"""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.cache import say

SLOW_TURN = 0.35  # radians over max_positions; cos(0.35) = 0.94 is the most that a match may lose to rotation
OFFSET_PAIRS = 4
MLP = 64  # width of the MLP, which is all zeros; a Llama must have one
BUILDER = 1  # counts changes of this file that change the weights: cached copies of older ones are made anew


@dataclass(frozen=True)
class Retrieval:
    """One variant. Keys are pairs of tokens: vocab^2 / 8 distinct ones, of 4 tokens a record (see benchmarks.tasks)."""

    head_dim: int = 128
    kv_heads: int = 2
    vocab: int = 512
    theta: float = 1e16
    max_positions: int = 131072
    pos_margin: float = 32.0
    match_margin: float = 28.0
    # Added to layer 1's keys in the slowest pairs, as a key bias would be: scores of one query all move by the same
    # amount, so the answers stay, while per-token key formats get an outlier channel.
    key_offset: float = 0.0
    seed: int = 0


PRESETS = {
    "retrieval": Retrieval(),
    "retrieval-small": Retrieval(head_dim=64, kv_heads=1, vocab=256, theta=1e12),
    "retrieval-offset": Retrieval(head_dim=64, kv_heads=1, vocab=256, theta=1e12, key_offset=30.0),
}


def build(variant: Retrieval, folder: Path) -> None:
    """Computes the variant's weights and writes them, float32, with config and tokenizer into `folder`."""
    import torch
    from safetensors.torch import save_file

    geometry = Geometry(variant)
    weights, gap = position_kernel(geometry.frequencies[geometry.fast], variant.max_positions)
    codes, coherence = token_codes(variant.vocab, len(geometry.slow), variant.seed)
    say(
        f"retrieval: {len(geometry.fast)} position pairs, gap {gap:.3f}; {len(geometry.slow)} content pairs, "
        f"largest product of two codes {coherence:.3f}"
    )
    tensors = {"model.embed_tokens.weight": geometry.embedding(codes), "lm_head.weight": geometry.lm_head(codes)}
    tensors["model.norm.weight"] = np.ones(geometry.hidden)
    copy_scale = variant.pos_margin / gap
    match_scale = variant.match_margin / (1 - coherence)
    for layer, attention in enumerate([geometry.copy_layer(weights * copy_scale), geometry.match_layer(match_scale)]):
        tensors |= geometry.layer(layer, attention)
    save_file(
        {name: torch.tensor(array, dtype=torch.float32).contiguous() for name, array in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    write_config(variant, geometry.hidden, folder)
    write_tokenizer(variant, folder)


class Geometry:
    """Where things lie: RoPE pairs by speed, fields in the residual stream, heads in the projections."""

    def __init__(self, variant: Retrieval) -> None:
        self.variant = variant
        half = variant.head_dim // 2
        self.frequencies = variant.theta ** (-np.arange(half) / half)
        turns = self.frequencies * variant.max_positions
        self.fast, self.slow = np.where(turns > SLOW_TURN)[0], np.where(turns <= SLOW_TURN)[0]
        code = len(self.slow)
        if code < 8 or len(self.fast) < 8:
            raise ValueError(
                f"theta={variant.theta:g}, head_dim={variant.head_dim}, max_positions={variant.max_positions} leave "
                f"{len(self.fast)} RoPE pairs for position and {code} for content; both need 8. Raise theta for more "
                "content pairs, lower it for more position pairs, or raise head_dim for both"
            )
        self.now, self.previous, self.before, self.answer = (slice(i * code, (i + 1) * code) for i in range(4))
        self.one = 4 * code
        self.hidden = -(-(4 * code + 1) // 64) * 64
        # Both members of each slow pair carry one number: the first `code` of them the newer token, the rest the older.
        channels = np.concatenate([self.slow, self.slow + half])
        self.newer, self.older = channels[0::2], channels[1::2]

    def rms(self, square: float) -> float:
        """What RMSNorm divides by when the fields' squares add up to `square`; projections multiply it back."""
        return math.sqrt(square / self.hidden)

    def embedding(self, codes: np.ndarray) -> np.ndarray:
        table = np.zeros((len(codes), self.hidden))
        table[:, self.now] = codes
        table[:, self.one] = 1
        return table

    def lm_head(self, codes: np.ndarray) -> np.ndarray:
        table = np.zeros((len(codes), self.hidden))
        table[:, self.answer] = 20 * self.rms(5) * codes
        return table

    def copy_layer(self, weights: np.ndarray) -> dict[str, np.ndarray]:
        """Layer 0: query head 2h copies token t-1, head 2h+1 token t-2, kv head h carrying its share of the code."""
        q, k, v, o = self._projections()
        constant = np.zeros(self.variant.head_dim)
        constant[self.fast] = np.sqrt(weights * math.sqrt(self.variant.head_dim))
        for h, share in self._shares():
            k[h, :, self.one] = constant * self.rms(2)
            for back, field in ((1, self.previous), (2, self.before)):
                q[2 * h + back - 1, :, self.one] = self._turned(constant, -back) * self.rms(2)
                self._route(o, 2 * h + back - 1, field, share, 1.0)
            self._read(v, h, share, self.rms(2))
        return self._named(q, k, v, o)

    def match_layer(self, scale: float) -> dict[str, np.ndarray]:
        """Layer 1: matches (t, t-1) against (p-1, p-2) and fetches p; two query heads fetch half each."""
        q, k, v, o = self._projections()
        gain = math.sqrt(scale * math.sqrt(self.variant.head_dim)) * self.rms(4)
        identity = gain * np.eye(len(self.slow))
        for h, share in self._shares():
            k[h][self.newer, self.previous] = identity
            k[h][self.older, self.before] = identity
            k[h][self.slow[-OFFSET_PAIRS:], self.one] = self.variant.key_offset * self.rms(4)
            for head in (2 * h, 2 * h + 1):
                q[head][self.newer, self.now] = identity
                q[head][self.older, self.previous] = identity
                self._route(o, head, self.answer, share, 0.5)
            self._read(v, h, share, self.rms(4))
        return self._named(q, k, v, o)

    def layer(self, index: int, attention: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The attention weights under their Llama names, with norms of one and an MLP of zeros."""
        prefix = f"model.layers.{index}."
        tensors = {f"{prefix}self_attn.{name}.weight": array for name, array in attention.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = np.ones(self.hidden)
        for name in ("gate_proj", "up_proj"):
            tensors[f"{prefix}mlp.{name}.weight"] = np.zeros((MLP, self.hidden))
        tensors[f"{prefix}mlp.down_proj.weight"] = np.zeros((self.hidden, MLP))
        return tensors

    def _projections(self) -> list[np.ndarray]:
        """q [2 kv, D, hidden], k and v [kv, D, hidden], o [hidden, 2 kv, D], all zero."""
        kv, dim, hidden = self.variant.kv_heads, self.variant.head_dim, self.hidden
        shapes = [(2 * kv, dim, hidden), (kv, dim, hidden), (kv, dim, hidden), (hidden, 2 * kv, dim)]
        return [np.zeros(shape) for shape in shapes]

    def _shares(self) -> list[tuple[int, np.ndarray]]:
        return list(enumerate(np.array_split(np.arange(len(self.slow)), self.variant.kv_heads)))

    def _read(self, v: np.ndarray, head: int, share: np.ndarray, factor: float) -> None:
        v[head, np.arange(len(share)), self.now.start + share] = factor

    def _route(self, o: np.ndarray, head: int, field: slice, share: np.ndarray, factor: float) -> None:
        o[field.start + share, head, np.arange(len(share))] = factor

    def _turned(self, vector: np.ndarray, position: int) -> np.ndarray:
        """RoPE at a position, in Hugging Face's layout (pairs j and j + D/2)."""
        low, high = np.split(vector, 2)
        cos, sin = np.cos(self.frequencies * position), np.sin(self.frequencies * position)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin])

    def _named(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, o: np.ndarray) -> dict[str, np.ndarray]:
        flat = {"q_proj": q, "k_proj": k, "v_proj": v}
        return {n: a.reshape(-1, self.hidden) for n, a in flat.items()} | {"o_proj": o.reshape(self.hidden, -1)}


def position_kernel(frequencies: np.ndarray, max_distance: int, rounds: int = 4) -> tuple[np.ndarray, float]:
    """Weights w >= 0, sum 1, with the largest gap min over x in 1..max_distance of sum_j w_j (1 - cos(f_j x)); the gap.

    Solved on a sample of distances, to which each round adds the worst of all (cutting planes).
    """

    def deficits(distances: np.ndarray) -> np.ndarray:
        return 1 - np.cos(np.outer(distances, frequencies))

    everything = deficits(np.arange(1, max_distance + 1))
    sample = np.unique(np.geomspace(1, max_distance, 2000).astype(int))
    best, best_gap = np.ones(len(frequencies)) / len(frequencies), -1.0
    for _ in range(rounds):
        weights = _max_min(deficits(sample))
        scores = everything @ weights
        if scores.min() > best_gap:
            best, best_gap = weights, float(scores.min())
        sample = np.union1d(sample, np.argsort(scores)[:300] + 1)
    return best, best_gap


def _max_min(rows: np.ndarray, iterations: int = 3000) -> np.ndarray:
    """Maximises min(rows @ w) over the simplex: exponentiated gradient on a soft minimum that sharpens."""
    weights = np.ones(rows.shape[1]) / rows.shape[1]
    best, best_value = weights, -1.0
    for i in range(iterations):
        values = rows @ weights
        low = values.min()
        if low > best_value:
            best, best_value = weights, low
        attention = np.exp(-30 * (1 + i / 40) * (values - low))
        weights = weights * np.exp((attention @ rows) / attention.sum() * 0.5 / (1 + i / 300))
        weights /= weights.sum()
    return best


def token_codes(vocab: int, dim: int, seed: int) -> tuple[np.ndarray, float]:
    """Unit vectors [vocab, dim] pushed apart by gradient descent, and the largest product of two of them."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(vocab, dim, dtype=torch.float64, generator=generator).requires_grad_()
    optimizer = torch.optim.Adam([points], lr=0.02)
    self_products = 2 * torch.eye(vocab)
    for step in range(400):
        unit = torch.nn.functional.normalize(points, dim=1)
        sharpness = 10 + step * 0.15
        loss = torch.logsumexp(((unit @ unit.T - self_products) * sharpness).flatten(), 0) / sharpness
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    unit = torch.nn.functional.normalize(points.detach(), dim=1)
    return unit.numpy(), float((unit @ unit.T - self_products).max())


def write_config(variant: Retrieval, hidden: int, folder: Path) -> None:
    positions = variant.max_positions + 8
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": variant.vocab,
        "hidden_size": hidden,
        "intermediate_size": MLP,
        "num_hidden_layers": 2,
        "num_attention_heads": 2 * variant.kv_heads,
        "num_key_value_heads": variant.kv_heads,
        "head_dim": variant.head_dim,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_theta": variant.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": variant.theta},
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": False}))
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": positions}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (folder / "variant.json").write_text(json.dumps(asdict(variant), indent=1))


def write_tokenizer(variant: Retrieval, folder: Path) -> None:
    """Token i is the word `ti`; words are separated by spaces."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    tokenizer = Tokenizer(WordLevel({f"t{i}": i for i in range(variant.vocab)}, unk_token="t0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
