"""Length-grouped batching in real vLLM: the stock scheduler's tokens, in an order that spares the short prompts."""

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from benchmarks import tasks
from tests.e2e.support import GREEDY, engine, metric, prompts, texts
from vllm_ktx.scheduler import AsyncLengthGroupedScheduler, LengthGroupedScheduler

pytestmark = pytest.mark.e2e
VOCAB = 256
STEP = {"max_num_batched_tokens": 256}
FIVE = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


def scheduler(llm):
    return llm.llm_engine.engine_core.engine_core.scheduler


def needles(*lengths: int) -> list[tasks.Recall]:
    return [tasks.needle(n, VOCAB, 0.5, seed=i) for i, n in enumerate(lengths)]


def first_tokens(llm, asked: list[tuple[str, list[int], SamplingParams, int]], abort: dict[int, str] | None = None):
    """Steps until nothing is left: request ids in the order of their first token, and all tokens by id."""
    core, order, tokens = llm.llm_engine, [], {}
    for name, ids, params, priority in asked:
        core.add_request(name, {"prompt_token_ids": ids}, params, priority=priority)
    steps = 0
    while core.has_unfinished_requests():
        for out in core.step():
            if out.request_id not in order and out.outputs[0].token_ids:
                order.append(out.request_id)
            tokens[out.request_id] = [list(sample.token_ids) for sample in out.outputs]
        steps += 1
        if abort and steps in abort:
            core.abort_request([abort[steps]])
        assert steps < 2000
    return order, tokens


@pytest.fixture(scope="module")
def stock(retrieval_small):
    """Greedy tokens of mixed prompts under KTX with the stock scheduler."""
    found = needles(1900, 300, 1500, 64, 700, 1200, 100, 20)
    with engine(retrieval_small, {"scheduler": "stock"}, **STEP) as llm:
        assert type(scheduler(llm)).__module__.startswith("vllm.v1")
        return found, texts(llm.generate(prompts(*(n.prompt(0) for n in found)), GREEDY, use_tqdm=False))


def test_same_tokens_as_the_stock_scheduler(retrieval_small, stock):
    found, expected = stock
    with engine(retrieval_small, **STEP) as llm:
        assert type(scheduler(llm)) is LengthGroupedScheduler, "KTX chooses it"
        got = texts(llm.generate(prompts(*(n.prompt(0) for n in found)), GREEDY, use_tqdm=False))
        assert got == expected
        assert [ids[:5] for ids in got] == [n.answers for n in found]
        again = llm.generate(prompts(*(n.prompt(0) for n in found)), GREEDY, use_tqdm=False)
        assert texts(again) == expected
        assert again[0].num_cached_tokens >= 1900 - 64, "the second time from the prefix cache"


def test_other_backends_may_use_it_and_the_async_one_serves_too(retrieval_small, stock):
    found, expected = stock
    for cls in (LengthGroupedScheduler, AsyncLengthGroupedScheduler):
        path = f"vllm_ktx.scheduler.{cls.__name__}"
        with engine(retrieval_small, backend=None, scheduler_cls=path, **STEP) as llm:
            assert type(scheduler(llm)) is cls
            got = texts(llm.generate(prompts(*(n.prompt(0) for n in found)), FIVE, use_tqdm=False))
            assert got == [ids[:5] for ids in expected]


def test_short_prompts_answer_before_a_long_one_that_came_first(retrieval_small):
    found = needles(1990, 60, 70, 80)
    asked = [(str(i), n.prompt(0), FIVE, 0) for i, n in enumerate(found)]
    orders = {}
    for name in ("stock", "length_grouped"):
        with engine(retrieval_small, {"scheduler": name}, **STEP) as llm:
            orders[name], tokens = first_tokens(llm, asked)
        assert [tokens[str(i)][0] for i in range(4)] == [n.answers for n in found]
    assert orders == {"stock": ["0", "1", "2", "3"], "length_grouped": ["1", "2", "3", "0"]}


def test_priorities_come_first(retrieval_small):
    found = needles(1990, 60, 70)
    asked = [(str(i), n.prompt(0), FIVE, p) for i, (n, p) in enumerate(zip(found, (-1, 2, 1), strict=True))]
    options = {"scheduling_policy": "priority", "max_num_seqs": 1, **STEP}
    with engine(retrieval_small, **options) as llm:
        assert type(scheduler(llm)) is LengthGroupedScheduler
        order, tokens = first_tokens(llm, asked)
    assert order == ["0", "2", "1"]
    assert [tokens[str(i)][0] for i in range(3)] == [n.answers for n in found]


def test_parallel_samples_and_aborts(retrieval_small):
    found = needles(1990, 700, 60, 1500)
    four = SamplingParams(n=4, temperature=0.01, max_tokens=5, ignore_eos=True)
    asked = [(str(i), n.prompt(0), four if i == 1 else FIVE, 0) for i, n in enumerate(found)]
    with engine(retrieval_small, **STEP) as llm:
        _, tokens = first_tokens(llm, asked, abort={1: "3", 3: "0"})  # one that waits, one in mid prefill
        assert scheduler(llm).get_request_counts() == (0, 0)
    assert sorted({"1", "2"} & set(tokens)) == ["1", "2"]
    assert tokens["2"] == [found[2].answers]
    samples = [s for name, all_samples in tokens.items() if name == "1" for s in all_samples]
    assert samples and all(s == found[1].answers[: len(s)] for s in samples)


def test_preempted_requests_resume_and_answer_right(retrieval_small):
    found = needles(*[900] * 8)
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    with engine(retrieval_small, num_gpu_blocks_override=34, enable_prefix_caching=False) as llm:
        outs = texts(llm.generate(prompts(*(n.prompt(0) for n in found)), params, use_tqdm=False))
        assert metric(llm, "vllm:num_preemptions") > 0
    assert [ids[:5] for ids in outs] == [n.answers for n in found]


def test_long_prompts_that_do_not_fit_together_all_finish(retrieval_small):
    """33 usable pages; each long prompt takes 24 to 30 of them, beside short ones."""
    found = needles(1900, 100, 1700, 200, 1500, 60, 1900, 90)
    with engine(retrieval_small, num_gpu_blocks_override=34, **STEP) as llm:
        got = texts(llm.generate(prompts(*(n.prompt(0) for n in found)), FIVE, use_tqdm=False))
    assert got == [n.answers for n in found]


def test_a_cached_long_prompt_counts_as_short(retrieval_small):
    (long,) = needles(1900)
    with engine(retrieval_small, **STEP) as llm:
        llm.generate(prompts(long.prompt(0)), FIVE, use_tqdm=False)
        core = llm.llm_engine
        core.add_request("again", {"prompt_token_ids": long.prompt(0)}, FIVE)
        (request,) = list(scheduler(llm).waiting)
        assert scheduler(llm).batcher._tickets[request].bucket == 1024
        while core.has_unfinished_requests():
            core.step()


def test_structured_output_beside_a_long_prompt(smollm2):
    choice = SamplingParams(
        temperature=0, max_tokens=8, structured_outputs=StructuredOutputsParams(choice=["Paris", "Rome"])
    )
    with engine(smollm2, **STEP) as llm:
        asked = [{"prompt": "word " * 1500}, {"prompt": "The capital of France is"}]
        outs = llm.generate(asked, [FIVE, choice], use_tqdm=False)
    assert outs[1].outputs[0].text == "Paris" and len(outs[0].outputs[0].token_ids) == 5
