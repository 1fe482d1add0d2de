"""What vLLM does with requests (chunks, prefixes, samples, preemption, drafts, aborts), on KTX pages."""

import numpy as np
import pytest
from vllm import SamplingParams

from benchmarks import tasks
from tests.e2e.support import GREEDY, engine, metric, prompt_logprobs, prompts, texts
from vllm_ktx.metrics import STATS

pytestmark = pytest.mark.e2e
VOCAB = 256


def english(smollm2, tokens: int, skip: int = 0) -> list[int]:
    import pydoc_data.topics

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    text = "\n".join(pydoc_data.topics.topics[key] for key in sorted(pydoc_data.topics.topics))
    skip %= len(text) - 8 * tokens
    return tokenizer(text[skip : skip + 8 * tokens])["input_ids"][:tokens]


def needles(length: int, count: int = 4) -> list[tasks.Recall]:
    return [tasks.needle(length, VOCAB, depth, seed=i) for i, depth in enumerate(np.linspace(0, 1, count))]


def answers(llm, found: list[tasks.Recall]) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=len(found[0].answers), ignore_eos=True)
    return texts(llm.generate(prompts(*(n.prompt(0) for n in found)), params, use_tqdm=False))


@pytest.fixture(scope="module")
def stock(smollm2):
    """What stock vLLM says: prompt logprobs of two texts, and greedy continuations of three."""
    ids = [english(smollm2, 700), english(smollm2, 333, skip=20000)]
    starts = [english(smollm2, n, skip=7000 * n) for n in (5, 64, 300)]
    with engine(smollm2, backend=None) as llm:
        return ids, prompt_logprobs(llm, ids), starts, texts(llm.generate(prompts(*starts), GREEDY, use_tqdm=False))


@pytest.mark.parametrize("chunk", [64, 100])
def test_unquantized_pages_equal_stock_in_any_chunks(smollm2, stock, chunk):
    ids, expected, starts, continuations = stock
    options = {"max_num_batched_tokens": chunk, "enable_prefix_caching": False}
    with engine(smollm2, {"format": "none"}, **options) as llm:
        for got, want in zip(prompt_logprobs(llm, ids), expected, strict=True):
            assert np.abs(np.array(got) - want).max() < 2e-3
        assert texts(llm.generate(prompts(*starts), GREEDY, use_tqdm=False)) == continuations


@pytest.mark.parametrize(("fmt", "bound"), [("k8v8", 0.01), ("k8v4", 0.05), ("k4v4", 0.15)])
def test_quantized_pages_stay_close_to_stock(smollm2, stock, fmt, bound):
    ids, expected, _, _ = stock
    before = STATS.sealed
    with engine(smollm2, {"format": fmt}, max_num_batched_tokens=100, enable_prefix_caching=False) as llm:
        got = prompt_logprobs(llm, ids)
    assert STATS.sealed - before == sum(len(x) // 64 for x in ids), "every full page is sealed, and once"
    errors = np.concatenate([np.abs(np.array(g) - w) for g, w in zip(got, expected, strict=True)])
    assert 1e-6 < errors.mean() < bound


@pytest.mark.parametrize("fmt", ["k8v8", "k4v4"])
def test_prefix_hits_read_sealed_pages(retrieval_small, fmt):
    found = needles(1000)
    with engine(retrieval_small, {"format": fmt}) as llm:
        first = answers(llm, found)
        outs = llm.generate(prompts(*(n.prompt(0) for n in found)), GREEDY, use_tqdm=False)
        assert [o.num_cached_tokens for o in outs] == [960] * len(found)
        again = [ids[:5] for ids in texts(outs)]
    assert first == again == [n.answers for n in found]


def test_parallel_samples_share_their_prompt(retrieval_small):
    found = needles(700, 2)
    params = SamplingParams(n=4, temperature=0.01, seed=1, max_tokens=5, ignore_eos=True)
    with engine(retrieval_small) as llm:
        samples = texts(llm.generate(prompts(*(n.prompt(0) for n in found)), params, use_tqdm=False))
    assert samples == [n.answers for n in found for _ in range(4)]


def test_preemption_recomputes_and_answers_right(retrieval_small):
    """33 usable pages hold two prompts of 15, but not both with their 200 new tokens: one of them must give way."""
    found = needles(900, 8)
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    with engine(retrieval_small, num_gpu_blocks_override=34, enable_prefix_caching=False) as llm:
        outs = texts(llm.generate(prompts(*(n.prompt(0) for n in found)), params, use_tqdm=False))
        assert metric(llm, "vllm:num_preemptions") > 0
    assert [ids[:5] for ids in outs] == [n.answers for n in found]


def test_alone_and_in_a_batch_the_same_text(smollm2):
    """Greedy, and drawn by a seed."""
    starts = [english(smollm2, n, skip=3000 + 400 * n) for n in (1, 17, 63, 64, 65, 200, 511)]
    kinds = ({"temperature": 0}, {"temperature": 0.9, "seed": 3})
    params = [SamplingParams(**kinds[i % 2], max_tokens=70, ignore_eos=True) for i in range(len(starts))]
    with engine(smollm2, {"format": "k4v4"}, enable_prefix_caching=False) as llm:
        together = texts(llm.generate(prompts(*starts), params, use_tqdm=False))
        alone = [texts(llm.generate(prompts(s), p, use_tqdm=False))[0] for s, p in zip(starts, params, strict=True)]
    assert together == alone


def test_ngram_drafts_change_nothing_but_the_steps(smollm2):
    start = english(smollm2, 60) * 4  # repetitive, so that drafts are accepted
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    with engine(smollm2, {"format": "none"}) as llm:
        plain = texts(llm.generate(prompts(start), params, use_tqdm=False))
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
    with engine(smollm2, {"format": "none"}, speculative_config=drafts) as llm:
        drafted = texts(llm.generate(prompts(start), params, use_tqdm=False))
        assert metric(llm, "vllm:spec_decode_num_accepted_tokens") > 20
    assert drafted == plain


def test_quantized_pages_with_drafts_answer_right(retrieval_small):
    found = needles(1000)
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    with engine(retrieval_small, {"format": "k4v4"}, speculative_config=drafts) as llm:
        assert answers(llm, found) == [n.answers for n in found]


def test_abort_in_mid_stream_leaves_the_others_alone(retrieval_small):
    found = needles(800, 4)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with engine(retrieval_small) as llm:
        core = llm.llm_engine
        for i, need in enumerate(found):
            core.add_request(str(i), {"prompt_token_ids": need.prompt(0)}, params)
        done, steps = {}, 0
        while core.has_unfinished_requests():
            for out in core.step():
                if out.finished:
                    done[out.request_id] = list(out.outputs[0].token_ids)
            steps += 1
            if steps == 6:
                core.abort_request(["1"])
        assert set(done) - {"1"} == {"0", "2", "3"}
        assert all(done[str(i)][:5] == found[i].answers for i in (0, 2, 3))
        assert answers(llm, [found[1]]) == [found[1].answers], "the aborted prompt's pages serve it again"


def test_reused_blocks_never_show_old_content(retrieval_small):
    """A cache that holds 2 prompts serves 12 in turn, hits and misses mixed: each answer is its own prompt's."""
    found = [tasks.needle(900, VOCAB, depth, seed=s) for s, depth in enumerate(np.linspace(0, 1, 12))]
    with engine(retrieval_small, {"format": "k4v4"}, num_gpu_blocks_override=40, max_num_seqs=2) as llm:
        for order in (range(12), [0, 0, 5, 5, 11, 0]):
            asked = [found[i] for i in order]
            assert answers(llm, asked) == [n.answers for n in asked]


def test_sharp_recall_at_8k_with_low_margins():
    """Margins small enough that a page read with wrong scales, or from a wrong place, changes an answer."""
    from benchmarks import models

    model = models.constructed(
        models.Retrieval(head_dim=64, kv_heads=1, vocab=VOCAB, theta=1e12, pos_margin=12, match_margin=8)
    )
    recall = tasks.dense_recall(8000, VOCAB, queries=60, seed=5)
    dense = {"format": "k8v8", "attention": "dense"}
    with engine(model, dense, max_model_len=8192, max_num_batched_tokens=1000) as llm:
        outs = llm.generate(
            prompts(recall.ids), SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1), use_tqdm=False
        )
    steps = outs[0].prompt_logprobs
    got = [max(steps[p + 1].items(), key=lambda kv: kv[1].logprob)[0] for p in recall.positions[:-1]]
    assert np.mean(np.array(got) == recall.answers[:-1]) == 1.0
