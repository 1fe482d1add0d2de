"""The key-outlier fold: a model with large key channels that computes what the original computes.

Some trained models (Qwen2.5) have a few key channels many times larger than the rest, and a KV format that shares one
scale across a token's channels loses the small ones. `fold_key_outliers` puts such channels into any RoPE model: RoPE
turns channels j and j + D/2 as one pair, so scaling both rows of k_proj by s and both rows of q_proj by 1/s leaves
every score q.k as it was. With s a power of two the products are the same floats, bit for bit (short of overflow).

A second kind of outlier, a constant offset on keys (Qwen's key bias), can't be folded into a trained RoPE model: it
adds q . R(p) b to the score of position p, which differs from position to position unless the pair doesn't turn at
all. The constructed retrieval model has such pairs; see `key_offset` there.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cache import MANIFEST


def fold_key_outliers(model_dir: str | Path, out_dir: str | Path, scale: float, pairs: Sequence[int] = (1, -2)) -> Path:
    """Writes to out_dir a copy of the model whose key channels (j, j + D/2) are `scale` times larger, for j in pairs.

    pairs: RoPE pair indices in [-D/2, D/2), the same in every layer and kv head; negative ones count from the slowest.
    Raises ValueError for a pair out of range, scale <= 0, or a model that normalises its queries and keys after the
    projection (q_norm, k_norm), which would undo the fold.
    """
    import torch
    from safetensors.torch import load_file, save_file

    source, target = Path(model_dir), Path(out_dir)
    half = _head_dim(source) // 2
    if scale <= 0:
        raise ValueError(f"scale={scale} must be positive")
    if bad := [j for j in pairs if not -half <= j < half]:
        raise ValueError(f"pairs {bad} are outside [-{half}, {half}): the model has head_dim {2 * half}")
    factor = torch.ones(2, half)
    factor[:, list(pairs)] = scale
    factor = factor.flatten()

    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.name == MANIFEST:
            continue
        if file.suffix != ".safetensors":
            shutil.copy(file, target / file.name)
            continue
        tensors = load_file(file)
        if any("q_norm" in name or "k_norm" in name for name in tensors):
            raise ValueError(f"{source} normalises queries and keys (q_norm, k_norm): the fold would not cancel")
        for name, tensor in tensors.items():
            if ".k_proj." in name:
                tensors[name] = _scale_rows(tensor, factor)
            elif ".q_proj." in name:
                tensors[name] = _scale_rows(tensor, 1 / factor)
        save_file(tensors, target / file.name, metadata={"format": "pt"})
    return target


def _scale_rows(weight, factor):
    """Scales rows head by head: [heads * D, ...] by [D]. Under GQA queries just have more heads than keys."""
    rows = factor.repeat(weight.shape[0] // len(factor)).to(weight.dtype)
    return (weight * rows.view(-1, *[1] * (weight.dim() - 1))).contiguous()


def _head_dim(model_dir: Path) -> int:
    config = json.loads((model_dir / "config.json").read_text())
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
