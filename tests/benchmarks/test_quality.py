"""The quality benchmark's arithmetic on made-up scores, the simulated rule against a scalar one, and one small run."""

import json
import math
import os

import numpy as np
import pytest
import torch

from benchmarks import engine, quality, stock_rules
from benchmarks.engine import Scores


def scores_of(logprobs, targets):
    """Scores from full log-probabilities `[n, vocab]`."""
    order = np.argsort(-logprobs, axis=1, kind="stable")[:, : engine.TOP]
    nll = -logprobs[np.arange(len(targets)), targets]
    return Scores(nll, order, np.take_along_axis(logprobs, order, 1))


def random_scores(seed, noise=0.0, rows=200, vocab=64):
    rng = np.random.default_rng(seed)
    logits = 3 * rng.standard_normal((rows, vocab))
    targets = rng.integers(0, vocab, rows)
    logits += noise * np.random.default_rng(1).standard_normal(logits.shape)
    logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    return scores_of(logprobs, targets), logprobs


def test_a_coarser_divergence_bounds_the_true_one_from_below_and_is_close():
    (a, p), (b, q) = random_scores(0), random_scores(0, noise=0.2)
    exact = (np.exp(p) * (p - q)).sum(1)
    bound = quality.kl_lower_bound(a, b)
    assert (bound <= exact + 1e-9).all()
    assert bound.sum() > 0.8 * exact.sum()
    np.testing.assert_allclose(quality.kl_lower_bound(a, a), 0, atol=1e-12)


def test_perplexity_is_paired_and_counts_only_the_scored_rows():
    (a, _), (b, _) = random_scores(0), random_scores(0, noise=0.2)
    rows = [3, 5, 8, 13]
    work = quality.Workload([[1]], 1, [], [[0] * 201], [rows])
    found = quality.perplexity(work, [a], [b])
    difference = b.nll[rows] - a.nll[rows]
    assert found["tokens"] == 4
    assert found["ppl_change"] == pytest.approx(found["ppl"] / found["ppl_stock"] - 1)
    assert found["ppl_change_stderr"] == pytest.approx(math.exp(difference.mean()) * difference.std(ddof=1) / 2)


def test_agreement_counts_generated_positions_only():
    (a, _), _ = random_scores(0), None
    work = quality.Workload([[0] * 101], 100, [], [[0] * 201], [None])  # rows 100 .. 199 predict the continuation
    other = Scores(a.nll, a.top_ids.copy(), a.top_logprobs)
    other.top_ids[:100, 0] = -1  # in the prompt: must not count
    other.top_ids[100:110, 0] = -1
    stock = quality.Measured([[0] * 100], [a], [a])
    found = quality.compare(work, stock, quality.Measured([], [other], [a]))
    assert (found["agreement"], found["agreement_positions"]) == (0.9, 100)
    assert "decode_agreement" not in found


def test_decode_is_compared_up_to_the_first_difference():
    found = quality.decode_agreement([[1, 2, 3, 4], [5, 6], [7]], [[1, 2, 9, 4], [5, 6], [8]])
    assert found["decode_diverged"] == 2
    assert found["decode_agreement"] == 4 / 6  # 1 2 | 5 6 equal, two differences
    assert found["decode_prefix_share"] == 4 / 7


@pytest.mark.parametrize("dim", [64, 80])
def test_the_simulated_rule_is_the_kernels_rule(dim):
    from vllm.v1.attention.ops.int4_per_token_head import single_rht

    x = torch.randn(3, dim) * torch.tensor([[1.0], [100.0], [0.0]]) + torch.tensor([[0.0], [50.0], [0.0]])
    rotated, want = single_rht(x.clone()), torch.empty_like(x)
    for i, row in enumerate(rotated.tolist()):
        scale = max((max(row) - min(row)) / 15, 1e-6)
        zero = min(max(round(-min(row) / scale), 0), 15)
        want[i] = torch.tensor([(min(max(round(v / scale) + zero, 0), 15) - zero) * scale for v in row])
    want = single_rht(want, inverse=True) / (dim & -dim)
    # A code may differ by one where a value lies halfway between two.
    error = (stock_rules.int4_per_token_head(x) - want).norm(dim=1)
    assert (error <= 0.02 * want.norm(dim=1) + 1e-6).all()


def test_without_its_rule_the_simulation_is_the_plain_model(retrieval_small):
    from transformers import AutoModelForCausalLM

    ids = torch.randint(0, 256, (1, 300)).tolist()[0]
    (found,) = stock_rules.simulate(str(retrieval_small), [ids], rule=None)
    model = AutoModelForCausalLM.from_pretrained(retrieval_small, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0, :-1]
    nll = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
    np.testing.assert_allclose(found.nll, nll, atol=1e-3, rtol=1e-4)


def test_a_failing_or_dying_child_is_an_error_with_its_cause():
    with pytest.raises(RuntimeError, match="invalid literal"):
        engine.in_fresh_process(int, "x")
    with pytest.raises(RuntimeError, match="exit code 3"):
        engine.in_fresh_process(os._exit, 3)


def test_settings_are_checked_before_anything_starts(capsys):
    with pytest.raises(SystemExit):
        quality.main(["--format", "k8v8,k9"])
    assert "'k9' is unknown: use one of none, k8v8" in capsys.readouterr().err


@pytest.mark.e2e
def test_a_small_run_ends_in_one_json_object_and_proves_that_ktx_ran(capsys):
    quality.main(
        ["--model", "retrieval-small", "--format", "k8v4", "--tokens", "512", "--context", "512", "--prompts", "3"]
        + ["--json", "--stock-rules"]
    )
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["format"] == "k8v4" and found["tokens"] == 32
    assert found["counters"]["sealed"] > 0 and found["counters"]["decode_tokens"] > 0
    assert found["agreement"] == found["decode_agreement"] == 1.0
    assert abs(found["ppl_change"]) < 1e-3
    assert found["stock"]["self_agreement"] == 1.0
    assert [row["format"] for row in found["rows"]] == ["k8v4", "int4_per_token_head (simulated)"]
