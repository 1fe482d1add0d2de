"""Page formats through real vLLM: by layer in one cache, rotated keys, groups of 32 and 8-bit scales."""

import math

import numpy as np
import pytest

from tests.e2e.support import engine, prompt_logprobs
from tests.e2e.test_serving import english
from vllm_ktx.attention_backends.ktx import KTXImpl
from vllm_ktx.kv_quant import PageLayout, parse_format
from vllm_ktx.metrics import STATS

pytestmark = pytest.mark.e2e
PAGEWISE = {"max_num_batched_tokens": 64, "enable_prefix_caching": False, "kv_cache_memory_bytes": 64 << 20}


@pytest.fixture(scope="module")
def text(smollm2):
    return english(smollm2, 600)


def scored(model, ktx, ids, **options):
    """Logprobs of a text whose queries read nearly all keys from codes, blocks, and page bytes by layer."""
    with engine(model, {"attention": "dense", **ktx}, **PAGEWISE, **options) as llm:
        context = llm.llm_engine.vllm_config.compilation_config.static_forward_context
        pages = {name: layer.kv_cache.shape[1:].numel() * layer.kv_cache.element_size()
                 for name, layer in context.items() if isinstance(getattr(layer, "impl", None), KTXImpl)}  # fmt: skip
        blocks = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
        before = STATS.steps
        found = np.array(prompt_logprobs(llm, [ids])[0])
        assert STATS.steps - before == math.ceil(len(ids) / 64), "a step counts once, however many formats there are"
    return found, blocks, list(pages.values())


@pytest.fixture(scope="module")
def plain(smollm2, text):
    return scored(smollm2, {"format": "k8v8"}, text)


def test_formats_by_layer_share_one_cache_and_cost_their_own_bytes(smollm2, text, plain):
    mixed = {"default": "k4v4", "layers": {"0-1": "k8v8", "29": "none"}}
    found, blocks, pages = scored(smollm2, {"format": mixed}, text)
    sizes = {name: PageLayout(parse_format(name), 64, 3, 64, 4).page_bytes for name in ("k8v8", "k4v4", "none")}
    assert pages == [*[sizes["k8v8"]] * 2, *[sizes["k4v4"]] * 27, sizes["none"]]
    assert blocks == (64 << 20) // sum(pages), "vLLM divides its memory by the real bytes of all layers"
    same_as, _, pages_plain = plain
    assert pages_plain == [sizes["k8v8"]] * 30 and 1e-3 < np.abs(found - same_as).mean() < 0.2
    every = {"default": "k4v4", "layers": {"0-14": "k8v8", "15-29": "k8v8"}}
    same, _, _ = scored(smollm2, {"format": every}, text)
    assert np.array_equal(same, same_as), "layers named one by one are the format itself"


def test_a_layer_that_the_model_lacks_is_named(smollm2):
    with pytest.raises(ValueError, match="names layer 30, and the model has layers 0 to 29"):
        scored(smollm2, {"format": {"default": "k4v4", "layers": {"28-30": "k8v4"}}}, [1, 2])


@pytest.mark.parametrize(
    ("settings", "same_bytes"),
    [({"rotate_keys": True}, True), ({"scale_bits": 8, "key_scale": "per_channel_32"}, False)],
    ids=["rotated keys", "groups, 8-bit scales"],
)
def test_other_methods_serve_and_stay_close(smollm2, text, plain, settings, same_bytes):
    found, _, pages = scored(smollm2, {"format": "k8v8", **settings}, text[:300])
    assert 0 < np.abs(found - plain[0][:299]).mean() < 0.02
    assert (pages == plain[2]) == same_bytes
