"""Selecting KTX, or not: what is refused at start-up and how, what vLLM's own settings mean, and that an installed but
unselected plugin changes nothing.
"""

import json
import os
import subprocess
import sys

import pytest
from vllm import LLM

from benchmarks import tasks
from tests.e2e.support import engine, prompts, texts
from vllm_ktx.attention_backends import self_check
from vllm_ktx.metrics import STATS

pytestmark = pytest.mark.e2e


def tiny(folder, **changes):
    """A model directory without weights, for engines that must not get as far as needing them."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "vocab_size": 128,
        "max_position_embeddings": 512,
        "torch_dtype": "float32",
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


OFFLINE = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 256}


@pytest.mark.parametrize(
    ("ktx", "options", "message"),
    [
        ({"fromat": "k4v4"}, {}, "ktx.fromat is not a setting of KTX; did you mean 'format'"),
        ({"format": "k4v5"}, {}, "ktx.format='k4v5': use one of none, k8v8, k8v4, k4v4, auto; did you mean"),
        ({"residual_pages": -1}, {}, "ktx.residual_pages=-1: use a whole number from 0 to 16"),
        ({"format": "k8v8"}, {"kv_cache_dtype": "int4_per_token_head"}, "contradicts --kv-cache-dtype"),
        ({}, {"block_size": 48}, "--block-size 48: KTX needs a multiple of 32"),
        ({}, {"block_size": 512}, "--block-size 512: KTX needs a multiple of 32 up to 256"),
        ({}, {"kv_cache_dtype": "fp8"}, "kv_cache_dtype not supported"),
        (
            {},
            {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
            "KV connector",
        ),
    ],
)
def test_bad_settings_fail_at_start_up(tmp_path, ktx, options, message):
    with (
        pytest.raises(Exception, match="(?s)" + message.replace("(", r"\(")),
        engine(tiny(tmp_path), ktx, **(OFFLINE | options)),
    ):
        pass


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 128},
            "sliding window",
        ),
        ({"head_dim": 24}, "head_dim 24: must be a multiple of 16"),
        (
            {
                "architectures": ["DeepseekV2ForCausalLM"],
                "model_type": "deepseek_v2",
                "kv_lora_rank": 32,
                "qk_rope_head_dim": 16,
                "qk_nope_head_dim": 16,
                "v_head_dim": 32,
                "q_lora_rank": None,
                "n_routed_experts": 2,
                "first_k_dense_replace": 2,
            },
            "VLLM_MLA_DISABLE=1",
        ),
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba", "state_size": 16}, "Mamba"),
    ],
)
def test_models_it_cannot_serve_are_refused_by_name(tmp_path, changes, message):
    with pytest.raises(Exception, match=message), engine(tiny(tmp_path, **changes), **OFFLINE):
        pass


def test_kernels_that_are_wrong_here_stop_the_start(tmp_path, monkeypatch):
    """The layers' own kernels, formats and settings are tried, before the cache is made."""
    monkeypatch.setattr(self_check, "_error", lambda got, want: 0.3)
    with (
        pytest.raises(Exception, match=r"wrong on this CPU: dense attention is off by 0.3 .*ktx.self_check=false"),
        engine(tiny(tmp_path), {"self_check": True}, **OFFLINE),
    ):
        pass


@pytest.mark.parametrize(("dtype", "fmt"), [("int8_per_token_head", "k8v8"), ("int4_per_token_head", "k4v4")])
def test_vllms_own_cache_dtypes_choose_a_format(retrieval_small, dtype, fmt):
    need = tasks.needle(600, 256, 0.3)
    with engine(retrieval_small, kv_cache_dtype=dtype) as llm:
        tokens = llm.llm_engine.vllm_config.cache_config.kv_cache_size_tokens
        assert texts(llm.generate(prompts(need.prompt(0)), use_tqdm=False))[0][:5] == need.answers
    with engine(retrieval_small, {"format": fmt}) as llm:
        assert llm.llm_engine.vllm_config.cache_config.kv_cache_size_tokens == tokens
        llm.generate(prompts([1, 2]), use_tqdm=False)


@pytest.mark.parametrize(("fmt", "ratio"), [("k8v8", 1.8), ("k8v4", 2.3), ("k4v4", 3.2)])
def test_as_many_cached_tokens_as_promised(smollm2, fmt, ratio):
    """By vLLM's own count for the same cache memory, headers and scales included, against stock bf16."""

    def cached(backend, ktx=None):
        with engine(smollm2, ktx, backend=backend, dtype="bfloat16", block_size=64) as llm:
            llm.generate(prompts([1, 2, 3]), use_tqdm=False)
            return llm.llm_engine.vllm_config.cache_config.kv_cache_size_tokens

    assert cached("KTX", {"format": fmt}) / cached(None) >= ratio


UNSELECTED = """
import sys, json
from vllm import LLM, SamplingParams
from vllm.platforms import current_platform
if __name__ == "__main__":
    llm = LLM(sys.argv[1], enforce_eager=True, dtype="float32", kv_cache_memory_bytes=64 << 20, max_model_len=1024)
    out = llm.generate([{"prompt_token_ids": list(range(5, 300))}],
                       SamplingParams(temperature=0, max_tokens=20, prompt_logprobs=0, ignore_eos=True),
                       use_tqdm=False)[0]
    steps = [next(iter(s.values())).logprob for s in out.prompt_logprobs[1:]]
    print("RESULT", json.dumps([list(out.outputs[0].token_ids), steps, "vllm_ktx.plugin" in sys.modules]))
"""


def test_installed_but_not_selected_changes_nothing(smollm2, tmp_path):
    script = tmp_path / "unselected.py"
    script.write_text(UNSELECTED)

    def run(plugins):
        env = os.environ | {"VLLM_PLUGINS": plugins, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        command = [sys.executable, str(script), str(smollm2)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=True)
        return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))[7:])

    with_ktx, without = run("ktx"), run("none")
    assert (with_ktx[2], without[2]) == (True, False)
    assert with_ktx[:2] == without[:2], "bit-equal tokens and logprobs"


def test_spawned_engine_process(retrieval_small, monkeypatch):
    """The configuration that selects KTX is unpickled before plugins load there."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    need = tasks.needle(600, 256, 0.7)
    from vllm_ktx.metrics import snapshot

    before = STATS.attention_calls
    options = {"enforce_eager": True, "dtype": "float32", "kv_cache_memory_bytes": 64 << 20, "max_model_len": 1024}
    llm = LLM(str(retrieval_small), attention_backend="ktx", **options)
    try:
        assert texts(llm.generate(prompts(need.prompt(0)), use_tqdm=False))[0][:5] == need.answers
        counters = llm.collective_rpc(snapshot)[0]
        assert counters["attention_calls"] > 0 and counters["sealed"] >= 9
        assert STATS.attention_calls == before, "it ran in the other process"
    finally:
        llm.llm_engine.engine_core.shutdown()
