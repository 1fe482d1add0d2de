"""Models with key outliers, which compute what the plain ones do: every format and `auto` go through them.

The fold puts channels 32 times larger than the rest into SmolLM2; `retrieval-offset` has constant offsets on pairs that
don't turn, as a Qwen key bias. Keys with scales across channels are the control: they must fail here.
"""

import numpy as np
import pytest

from benchmarks import models, tasks
from benchmarks.workloads import folder_of
from tests.e2e.support import GREEDY, engine, prompt_logprobs, texts
from tests.e2e.test_serving import VOCAB, answers, english
from vllm_ktx.probe import measure, store

pytestmark = pytest.mark.e2e
PAGEWISE = {"max_num_batched_tokens": 64, "enable_prefix_caching": False}
BOUNDS = {"k8v8": 0.01, "k8v4": 0.05, "k4v4": 0.15}  # mean error of a logprob, as on the plain model


@pytest.fixture(scope="module")
def text(smollm2):
    return english(smollm2, 400)


@pytest.fixture(scope="module")
def exact(smollm2, text):
    """The plain model's logprobs, unquantized."""
    return logprobs(smollm2, {"format": "none"}, text)


def logprobs(model, ktx, ids):
    with engine(model, ktx, **PAGEWISE) as llm:
        return np.array(prompt_logprobs(llm, [ids])[0])


@pytest.mark.parametrize(
    ("scale", "fmt"),
    [(32, "k4v4")]
    + [pytest.param(s, f, marks=pytest.mark.slow) for s in (8, 32, 128) for f in BOUNDS if (s, f) != (32, "k4v4")],
)
def test_formats_bear_folded_outliers(text, exact, scale, fmt):
    error = np.abs(logprobs(folder_of(f"smollm2-s{scale}"), {"format": fmt}, text) - exact).mean()
    assert 1e-6 < error < BOUNDS[fmt]


def test_int4_keys_with_scales_across_channels_do_not(text, exact):
    error = np.abs(
        logprobs(folder_of("smollm2-s32"), {"format": "k4v4", "key_scale": "per_token"}, text) - exact
    ).mean()
    assert error > 5 * BOUNDS["k4v4"]


@pytest.mark.parametrize("fmt", ["k4v4", *(pytest.param(f, marks=pytest.mark.slow) for f in ("k8v8", "k8v4"))])
def test_formats_bear_position_free_offsets(fmt):
    found = [tasks.needle(900, VOCAB, depth, seed=i) for i, depth in enumerate((0.1, 0.5, 0.9))]
    with engine(models.path("retrieval-offset"), {"format": fmt}) as llm:
        assert answers(llm, found) == [n.answers for n in found]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["smollm2", "smollm2-s8", "smollm2-s32", "smollm2-s128", "retrieval-offset"])
def test_auto_stays_within_its_bound_and_sees_the_outliers(name, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_KTX_PROBES", str(tmp_path))
    found = measure.run(measure.Settings(str(folder_of(name)), tokens=1024), print)
    row = found.row(found.format)
    assert row and row["safe"] and row["worst"] <= store.DEFAULT_BOUND
    smaller = [r for r in found.rows if r["bytes_per_token"] < row["bytes_per_token"]]
    assert all(r["worst"] > store.DEFAULT_BOUND for r in smaller)
    assert (found.s_tok > store.S_TOK_BOUND) == (name != "smollm2")
    store.save(found)
    with engine(folder_of(name), {}) as llm:
        assert llm.llm_engine.vllm_config.additional_config["ktx"]["format"] == found.format
        assert len(texts(llm.generate([{"prompt_token_ids": [1, 2, 3]}], GREEDY, use_tqdm=False))[0]) == 24
