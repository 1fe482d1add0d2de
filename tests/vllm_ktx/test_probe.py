"""The probe's arithmetic on made-up readings, its texts, its command; and one small run through vLLM."""

import math

import numpy as np
import pytest
import torch

from vllm_ktx import cli
from vllm_ktx.kv_quant import codec
from vllm_ktx.probe import command, measure, store
from vllm_ktx.probe.engine import Scores
from vllm_ktx.probe.outliers import _Layer
from vllm_ktx.probe.texts import Texts, make_texts


def reading(noise=0.0, bytes_per_token=100.0, lengths=(300, 200), seed=0):
    """Scores over 20 tokens, all of them listed, off by `noise` from those of noise 0."""
    scores = []
    for i, n in enumerate(lengths):
        rng = np.random.default_rng(seed + i)
        logits = 2 * rng.standard_normal((n - 1, 20)) + noise * np.random.default_rng(9).standard_normal((n - 1, 20))
        logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        order = np.argsort(-logprobs, 1)
        scores.append(Scores(-logprobs[:, 0], order, np.take_along_axis(logprobs, order, 1)))
    layers = [{"layer": 0, "s_tok": 0.5, "s_channel": 0.1, "amplitude": 3.0}]
    return measure.Reading(scores, [[1] * 50], [], bytes_per_token, layers)


TEXTS = Texts([[0] * 300], [[0] * 150], [], [], 301, "made up")


def decision(noises, bound=2e-3):
    base, rows = reading(bytes_per_token=1000), []
    for fmt, (noise, size) in noises.items():
        row = measure.compare(TEXTS, 64, base, reading(noise, size))
        rows.append({"format": fmt, **row, "safe": row["worst"] <= bound})
    return measure.decide(measure.Settings("m", bound), "m", "0" * 32, rows, base, TEXTS)


def test_the_smallest_format_within_the_bound_is_chosen():
    noises = {"k4v4": (0.3, 300), "k8v4": (0.02, 400), "k8v8": (0.001, 500)}
    found = decision(noises)
    assert found.format == "k8v4" and [row["safe"] for row in found.rows] == [False, True, True]
    assert decision(noises, bound=1.0).format == "k4v4"
    assert decision(noises, bound=1e-9).format == "none"
    assert found.row("k4v4")["worst"] == max(found.row("k4v4")["kl"].values()) > found.row("k8v4")["worst"] > 0


def test_only_what_is_read_from_codes_counts():
    """Not the first page of a text, nor the prompt of a chat."""
    base, other = reading(), reading()
    for scores, rows in zip(other.scores, (slice(0, 64), slice(0, 149)), strict=True):
        scores.top_logprobs[rows] -= 1.0
    assert measure.compare(TEXTS, 64, base, other)["worst"] == pytest.approx(0, abs=1e-9)
    other.scores[1].top_logprobs[149:] -= 1.0
    found = measure.compare(TEXTS, 64, base, other)["kl"]
    assert found["chat"] > 0.1 and found["text"] == pytest.approx(0, abs=1e-9)


def test_the_table_names_every_format_and_layer():
    text = command.table(decision({"k4v4": (0.3, 300), "k8v4": (0.02, 400)}))
    assert "k8v4                400   2.50" in text and "<- chosen" in text and "k4v4" in text and "NO" in text
    assert "This model bears INT4 keys with scales across channels (s_tok 0.50, bound 1.5)" in text


@pytest.mark.parametrize(("method", "figure"), [("per_token", "s_tok"), ("per_channel", "s_channel")])
@pytest.mark.parametrize("outlier", [1.0, 30.0])
def test_predicted_noise_is_the_noise_that_the_codec_makes(method, figure, outlier):
    torch.manual_seed(0)
    layer, errors = _Layer(), []
    for _ in range(8):
        query, key = torch.randn(64, 4, 64), torch.randn(64, 2, 64)
        key[..., [5, 37]] *= outlier
        layer.add(query, key, 64**-0.5)
        pages = key.transpose(0, 1)
        codes, params = codec.quantize(pages, 4, method)
        wrong = codec.dequantize(codes, params.scale, params.minimum, method) - pages
        groups = query.reshape(64, 2, 2, 64)
        errors.append(torch.einsum("thgd,hnd->hgtn", groups, wrong) * 64**-0.5)
    measured = torch.stack(errors).square().mean((0, 2, 3, 4)).sqrt().max()
    assert layer.figures()[figure] == pytest.approx(float(measured), rel=0.1)
    assert layer.figures()["amplitude"] == pytest.approx(outlier, rel=0.15)


def test_texts_of_a_chat_model_and_of_one_without_a_tokenizer(smollm2, retrieval_small):
    chat = make_texts(smollm2, 512)
    assert len(chat.documents[0]) == 512 and len(chat.chats) == 4 and chat.stop
    assert chat.max_model_len >= max(512, *(len(c) + 128 for c in chat.chats))
    own = make_texts(retrieval_small, 512)
    assert own.documents == own.chats == [] and len(own.starts) == 4 and "no tokenizer" in own.kind
    assert own.max_model_len == 129


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no/such-model"], "its weights are not on this disk; give the model's folder"),
        (["x", "--bound", "0"], "--bound 0.0: must be above 0"),
        (["x", "--bound", "nan"], "--bound nan: must be above 0"),
        (["x", "--cache-gib", "0"], "--cache-gib 0.0: must be above 0"),
        (["x", "--page-size", "48"], "--page-size 48: must be a multiple of 32, up to 256"),
        (["x", "--tokens", "10"], "--tokens 10: must be at least 256"),
    ],
)
def test_the_command_says_what_is_wrong(capsys, arguments, message):
    assert cli.main(["probe", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_models_without_a_config_and_full_disks_are_said_in_a_line(capsys, tmp_path, monkeypatch):
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    for model in (tmp_path, tmp_path / "x.gguf"):
        assert cli.main(["probe", str(model)]) == 1
        assert f"model '{model}' has no config.json: give the folder" in capsys.readouterr().err
    monkeypatch.setattr(measure, "run", lambda settings, say: decision({"k8v4": (0.02, 400)}))
    monkeypatch.setenv("VLLM_KTX_PROBES", str(tmp_path / "x.gguf" / "probes"))
    assert cli.main(["probe", "x"]) == 1
    printed = capsys.readouterr()
    assert "k8v4" in printed.out and "Not a directory" in printed.err, "what was measured is shown all the same"


@pytest.mark.e2e
def test_a_small_probe_through_vllm_decides_and_auto_finds_it(retrieval_small, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_KTX_PROBES", str(tmp_path))
    said = []
    settings = measure.Settings(str(retrieval_small), tokens=512, cache_gib=0.1, formats=("k8v8",))
    found = measure.run(settings, said.append)
    assert found.row("k8v8")["kl"].keys() == {"text"} and 0 < found.row("k8v8")["worst"] < 1e-3
    assert found.format == "k8v8" and [layer["layer"] for layer in found.layers] == [0, 1]
    assert all(math.isfinite(layer["s_tok"]) and layer["s_tok"] > 0 for layer in found.layers)
    assert found.row("k8v8")["bytes_per_token"] < 0.6 * found.details["bytes_per_token_none"]
    assert any(line.startswith("k8v8: ") for line in said)
    store.save(found)
    assert store.find(str(retrieval_small))[0] == found
    from tests.e2e.support import engine

    with engine(retrieval_small, {}) as llm:
        assert llm.llm_engine.vllm_config.additional_config == {"ktx": {"format": "k8v8"}}
        llm.generate({"prompt_token_ids": [1, 2, 3]}, use_tqdm=False)
