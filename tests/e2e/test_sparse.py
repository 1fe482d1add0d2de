"""Sparse attention through real vLLM: equal to dense where it must be, right answers where pages are left out, and what
it says about itself. Windows are small, so that prompts of a thousand tokens have pages to leave out.
"""

from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
from prometheus_client import REGISTRY
from vllm import SamplingParams

from benchmarks import tasks
from tests.e2e.support import engine, metric, prompt_logprobs, prompts, texts
from tests.e2e.test_selection import OFFLINE, tiny
from tests.e2e.test_serving import VOCAB, answers, english
from vllm_ktx.attention_backends.ktx import KTXImpl
from vllm_ktx.metrics import STATS

pytestmark = pytest.mark.e2e
SMALL = {"window": 256, "min_pages": 2}
LONG = {"max_model_len": 8320, "max_num_batched_tokens": 1000}


@dataclass
class Counted:
    """What the counters gained; filled at the end of `counting`."""

    gained: dict

    def __getattr__(self, name):
        return self.gained[name]


@contextmanager
def counting(reads_less: bool = True):
    """The gain of the counters over the block; asserts that rows of it left pages out."""
    before, counted = STATS.snapshot(), Counted({})
    yield counted
    counted.gained |= {name: now - before[name] for name, now in STATS.snapshot().items()}
    if reads_less:
        assert 0 < counted.sparse_pages_read < counted.sparse_pages_context
        assert 0 < counted.sparse_rows <= counted.sparse_pages_context


def budget(llm, tokens: int) -> None:
    """Most tokens of a step from now on, up to what the engine started with."""
    llm.llm_engine.engine_core.engine_core.scheduler.max_num_scheduled_tokens = tokens


def greedy(llm, ids: list[list[int]], tokens: int = 8) -> tuple[list[list[int]], list[int]]:
    """Continuations of a batch, and how many tokens of each prompt came from the prefix cache."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    outs = llm.generate(prompts(*ids), params, use_tqdm=False)
    return texts(outs), [out.num_cached_tokens for out in outs]


# --- equal to dense ---------------------------------------------------------------------------------------------------


def everything(model, ktx: dict, chunks: list[int], long: list[int], short: list[int]) -> dict:
    """Logprobs of a long prompt in several chunk sizes; tokens of mixed batches, cold and on cached prefixes; alone."""
    found = {}
    with engine(model, ktx, max_model_len=2304, max_num_batched_tokens=1000) as llm:
        for chunk in chunks:
            budget(llm, chunk)
            assert llm.reset_prefix_cache()
            found[f"logprobs, chunks of {chunk}"] = prompt_logprobs(llm, [long])[0]
            mixed, cached = greedy(llm, [long, short, long[:700]])
            assert cached[0] > 1500 and cached[1] == 0 and cached[2] > 500
            found[f"mixed, chunks of {chunk}"] = mixed
        found["alone"] = [greedy(llm, [ids])[0] for ids in (long, short)]
    return found


@pytest.mark.parametrize(("name", "chunks"), [("smollm2", [100, 1000]), ("retrieval_small", [64, 100, 1000])])
def test_full_coverage_equals_dense(request, monkeypatch, name, chunks):
    model, calls = request.getfixturevalue(name), []
    attend = KTXImpl._attend_sparse
    monkeypatch.setattr(KTXImpl, "_attend_sparse", lambda *args: (calls.append(1), attend(*args))[1])
    if name == "smollm2":
        long, short = english(model, 2000), english(model, 90, skip=9000)
    else:
        long, short = tasks.needle(2000, VOCAB, 0.2).prompt(0), tasks.needle(90, VOCAB, 0.5, seed=1).prompt(0)
    dense = everything(model, {"format": "k4v4", "attention": "dense"}, chunks, long, short)
    assert not calls
    with counting(reads_less=False) as counted:
        sparse = everything(model, {"format": "k4v4", **SMALL, "coverage": 1.0}, chunks, long, short)
    assert calls, "the sparse path ran"
    assert counted.sparse_rows == counted.dropped_mass == 0, "and left nothing out"
    for what, want in dense.items():
        if what.startswith("logprobs"):
            assert np.abs(np.array(sparse[what]) - want).max() < 1e-3, what
        else:
            assert sparse[what] == want, what


# --- right answers with pages left out --------------------------------------------------------------------------------


def test_all_needles_at_8k_alone_in_batches_and_on_cached_prefixes(retrieval_small):
    """One context, a question for each of many depths: the first reads it, the others hit the prefix cache."""
    recall = tasks.dense_recall(8000, VOCAB, queries=24, seed=4)
    context = recall.ids[: recall.positions[0] - 1]
    asked = [[*context, *recall.ids[p - 1 : p + 1]] for p in recall.positions]
    mixed = [tasks.needle(n, VOCAB, depth, seed=n) for n, depth in ((200, 0.5), (1500, 0.0), (4000, 0.7), (650, 0.3))]
    with engine(retrieval_small, {"format": "k4v4", **SMALL}, **LONG) as llm:
        with counting() as counted:
            first, cached = greedy(llm, asked[:1], tokens=1)
        assert cached == [0] and first == [recall.answers[:1]]
        with counting() as counted:
            rest, cached = greedy(llm, asked, tokens=1)
        assert min(cached) > 7800 and [ids[0] for ids in rest] == recall.answers
        with counting() as counted:
            assert answers(llm, mixed) == [n.answers for n in mixed]
        assert counted.decode_tokens > 0
        with counting():
            assert [answers(llm, [n])[0] for n in mixed] == [n.answers for n in mixed]


def test_preemption_recomputes_and_answers_right(retrieval_small):
    """33 usable pages hold two prompts of 15, but not both with their 200 new tokens: one of them must give way."""
    found = [tasks.needle(900, VOCAB, depth, seed=i) for i, depth in enumerate(np.linspace(0, 1, 4))]
    options = {"num_gpu_blocks_override": 34, "enable_prefix_caching": False, "max_num_batched_tokens": 256}
    with counting(), engine(retrieval_small, {"format": "k4v4", **SMALL}, **options) as llm:
        outs, _ = greedy(llm, [n.prompt(0) for n in found], tokens=200)
        assert metric(llm, "vllm:num_preemptions") > 0
    assert [ids[:5] for ids in outs] == [n.answers for n in found]


def test_ngram_drafts_answer_right(retrieval_small):
    """A step then verifies several rows of a sequence at once, each with pages of its own."""
    found = [tasks.needle(1500, VOCAB, depth, seed=i) for i, depth in enumerate((0.1, 0.6, 0.9))]
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    with counting(), engine(retrieval_small, {"format": "k4v4", **SMALL}, speculative_config=drafts) as llm:
        assert answers(llm, found) == [n.answers for n in found]
        assert metric(llm, "vllm:spec_decode_num_accepted_tokens") > 0


def test_alone_and_in_a_batch_the_same_text_on_a_real_model(smollm2):
    """And the audit of these steps: what was claimed to be read was, nearly, and the outputs are close."""
    starts = [english(smollm2, n, skip=3000 + 400 * n) for n in (17, 600, 800)]
    ktx = {"format": "k4v4", **SMALL, "audit_rate": 0.5}
    with engine(smollm2, ktx, enable_prefix_caching=False) as llm:
        with counting() as counted:
            together = greedy(llm, starts, tokens=30)[0]
        alone = [greedy(llm, [ids], tokens=30)[0][0] for ids in starts]
    assert together == alone
    rows = counted.audited_rows
    recall, claim, error = (counted.gained[f"audited_{x}"] / rows for x in ("recall", "claim", "error"))
    assert rows > 100
    assert 0.9 < recall <= 1 and abs(recall - claim) < 0.05
    assert 0 < error < 0.25


# --- settings and metrics ---------------------------------------------------------------------------------------------


def exported(name: str, layer: int) -> float:
    return REGISTRY.get_sample_value(f"vllm_ktx:{name}_total", {"layer": str(layer)}) or 0.0


def test_dropped_mass_is_exported_by_layer_and_dense_layers_drop_none(retrieval_small):
    need = tasks.needle(1500, VOCAB, 0.4)
    ktx = {"format": "k4v4", **SMALL, "dense_layers": 1}
    with engine(retrieval_small, ktx, max_num_batched_tokens=512) as llm:
        llm.generate(prompts([1, 2]), use_tqdm=False)  # counters are exported when the next step is planned
        before = [exported("sparse_rows", layer) for layer in (0, 1)], exported("dropped_mass", 1)
        probed = exported("probed_share", 1)
        with counting() as counted:
            assert answers(llm, [need]) == [need.answers]
        llm.generate(prompts([1, 2]), use_tqdm=False)
    rows = [exported("sparse_rows", layer) - old for layer, old in enumerate(before[0])]
    assert rows == [0, counted.sparse_rows]
    assert exported("dropped_mass", 1) - before[1] == pytest.approx(counted.dropped_mass)
    assert 0 < counted.dropped_mass < 0.05 * counted.sparse_rows
    assert exported("probed_share", 1) - probed == pytest.approx(counted.probed_share)
    assert 0.35 * counted.sparse_rows <= counted.probed_share <= counted.sparse_rows


@pytest.mark.parametrize(
    ("ktx", "message"),
    [
        ({"window": 100}, "ktx.window=100 is not a multiple of the page size 64 .*: use 128, or another --block-size"),
        ({"coverage": 1.5}, "ktx.coverage=1.5: use a number above 0 and up to 1"),
        ({"format": "none", "attention": "sparse"}, "choose a quantized ktx.format, not 'none'"),
        ({"top_k": 9, "select": "coverage"}, "ktx.top_k=9 .*set ktx.select='top_k' and a value"),
        ({"min_pages": 9, "max_pages": 4}, "ktx.max_pages=4 is below ktx.min_pages=9: raise ktx.max_pages to 9"),
        ({"attention": "dense", "window": 128}, "ktx.window=128 does nothing without sparse attention"),
        ({"scoring": "header,"}, "ktx.scoring='header,': use one of header, cascade, codes; did you mean 'header'"),
    ],
)
def test_bad_settings_fail_at_start_up_and_name_the_fix(tmp_path, ktx, message):
    with pytest.raises(Exception, match=f"(?s){message}"), engine(tiny(tmp_path), ktx, **OFFLINE):
        pass
