"""No stale scales: a saturated engine that reuses hashed blocks all the time writes what a fresh one writes.

Requests of a few shared contexts with JSON answers by a schema, several at a time, in a cache that holds fewer pages
than they want: blocks are evicted, hit again, preempted and written anew. Steps of whole pages and no residual pages
make a token's arithmetic the same however its pages came to be there, so the texts must be equal.
"""

import json

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.e2e.support import engine, metric
from tests.e2e.test_serving import english

pytestmark = pytest.mark.e2e
SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 30},
        "number": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["statement", "expression", "other"]},
    },
    "required": ["title", "number", "kind"],
    "additionalProperties": False,
}
KTX = {"format": "k4v4", "residual_pages": 0, "attention": "dense"}
# Every step takes at most one whole page of each prompt, whatever else runs in it. vLLM lets a request that is alone
# take more: the fresh engine's budget is one page, and the saturated one gets a last few requests that don't count.
STEPS = {"max_num_batched_tokens": 256, "long_prefill_token_threshold": 64, "max_num_seqs": 4}
LAST = 3


def requests(smollm2, count: int, pages: int, contexts: int) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    shared = [tokenizer.decode(english(smollm2, 64 * pages, skip=9000 * i)) for i in range(contexts)]
    found = []
    for i in range(count):
        # Contexts recur after a while: some of their pages are still there, others were evicted meanwhile.
        task = f"{shared[(i * 3 + i // contexts) % contexts]}\n\nQuestion {i}: give title, number and kind as JSON."
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": task}], add_generation_prompt=True, tokenize=False
        )
        found.append(tokenizer(chat, add_special_tokens=False).input_ids)
    return found


def written(llm, asked: list[list[int]], tokens: int) -> list[str]:
    rules = StructuredOutputsParams(json=SCHEMA)
    params = SamplingParams(temperature=0, max_tokens=tokens, structured_outputs=rules)
    outs = llm.generate([{"prompt_token_ids": ids} for ids in asked], params, use_tqdm=False)
    return [out.outputs[0].text for out in outs]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("count", "pages", "contexts", "blocks"),
    [(7, 3, 3, 14), pytest.param(200, 6, 12, 24, marks=pytest.mark.slow)],
)
def test_a_saturated_engine_writes_what_a_fresh_one_writes(smollm2, count, pages, contexts, blocks):
    asked, tokens = requests(smollm2, count, pages, contexts), 60
    length = 64 * (pages + 4)
    with engine(smollm2, KTX, num_gpu_blocks_override=blocks, max_model_len=length, **STEPS) as llm:
        saturated = written(llm, asked + asked[:LAST], tokens)[:count]
        assert metric(llm, "vllm:num_preemptions") > 0, "the cache was full"
        assert metric(llm, "vllm:prefix_cache_hits") > 64 * count / 4, "hashed blocks were used again"
    alone = {"max_num_batched_tokens": 64, "enable_prefix_caching": False, "max_model_len": length}
    with engine(smollm2, KTX, **alone) as llm:
        fresh = [written(llm, [ids], tokens)[0] for ids in asked]
    assert saturated == fresh
    parsed = 0
    for text in fresh:
        try:
            parsed += json.loads(text).keys() == set(SCHEMA["required"])
        except ValueError:  # cut off by max_tokens
            pass
    assert parsed > 0.7 * count
