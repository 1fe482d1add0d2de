"""The prepared models answer right in transformers, and the cache notices damage."""

import json
from dataclasses import replace

import pytest
import torch

from benchmarks import cache, models
from benchmarks.models.outliers import fold_key_outliers
from benchmarks.models.retrieval import PRESETS, Geometry, Retrieval
from benchmarks.tasks import dense_recall, needle


def load(folder, **options):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()


@torch.inference_mode()
def logits(model, ids):
    return model(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("name", sorted(PRESETS))
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_retrieval_model_recalls_every_record(name, attention):
    task = dense_recall(2048, PRESETS[name].vocab, queries=32)
    model = load(models.path(name), attn_implementation=attention)
    assert logits(model, task.ids)[task.positions].argmax(-1).tolist() == task.answers


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_retrieval_model_generates_the_needle(depth, retrieval):
    task = needle(2048, PRESETS["retrieval"].vocab, depth)
    prompt = torch.tensor([task.prompt(0)])
    generated = load(retrieval).generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert generated[0, prompt.shape[1] :].tolist() == task.answers


def test_without_the_record_the_model_does_not_know(retrieval_small):
    """The answer comes from the context: with the asked record's value replaced, the prediction follows."""
    vocab = PRESETS["retrieval-small"].vocab
    task = dense_recall(1024, vocab, queries=1)
    key = task.ids[task.positions[0] - 1 : task.positions[0] + 1]
    at = next(i for i in range(len(task.ids)) if task.ids[i : i + 2] == key)
    changed = [*task.ids]
    changed[at + 2] = vocab - 1 if task.answers[0] != vocab - 1 else vocab - 2
    assert logits(load(retrieval_small), changed)[task.positions[0]].argmax().item() == changed[at + 2]


def test_lower_margins_mix_wrong_positions_into_the_answer(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_KTX_CACHE", str(tmp_path))
    small = PRESETS["retrieval-small"]
    task = dense_recall(1024, small.vocab, queries=16)

    def answer_logit(margin):
        model = load(models.constructed(replace(small, match_margin=margin)))
        return logits(model, task.ids)[task.positions, task.answers].mean().item()

    sure, *less = [answer_logit(margin) for margin in (28.0, 6.0, 4.0, 2.0)]
    assert sure == pytest.approx(20, abs=0.01)  # lm_head's scale: the whole weight on the right position
    assert less == sorted(less, reverse=True) and less[0] < sure - 0.01 and less[-1] < sure - 1


def test_key_offset_is_an_outlier_channel_that_changes_no_answer():
    plain, offset = (keys_of_layer_1(name) for name in ("retrieval-small", "retrieval-offset"))
    amplitude = offset.abs().amax(0)
    assert amplitude.max() > 1.5 * plain.abs().max()
    assert amplitude.max() > 3 * amplitude.median()


def keys_of_layer_1(name):
    model, seen = load(models.path(name)), {}
    model.model.layers[1].self_attn.k_proj.register_forward_hook(lambda m, i, o: seen.update(keys=o[0]))
    logits(model, dense_recall(512, PRESETS[name].vocab, queries=1).ids)
    return seen["keys"]


def test_geometry_that_leaves_no_room_names_the_settings():
    with pytest.raises(ValueError, match="theta=10000.*Raise theta"):
        Geometry(Retrieval(theta=1e4))


def test_smollm2_answers_a_chat(smollm2):
    from transformers import AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(smollm2), load(smollm2)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert "quantization_config" not in json.loads((smollm2 / "config.json").read_text())


@pytest.mark.parametrize("scale", [8, 32, 128])
def test_fold_key_outliers_changes_no_output(scale, smollm2, tmp_path):
    ids = list(range(1000, 1064))
    before = logits(load(smollm2), ids)
    folded = load(fold_key_outliers(smollm2, tmp_path / "folded", scale))
    assert torch.equal(logits(folded, ids), before)
    row = load(smollm2).model.layers[3].self_attn.k_proj.weight[1]
    assert torch.equal(folded.model.layers[3].self_attn.k_proj.weight[1], row * scale)


def test_fold_key_outliers_refuses_pairs_out_of_range(retrieval_small, tmp_path):
    with pytest.raises(ValueError, match=r"pairs \[32\].*head_dim 64"):
        fold_key_outliers(retrieval_small, tmp_path, 8, pairs=[32])


def test_path_takes_directories_and_explains_unknown_names(smollm2):
    assert models.path(smollm2) == smollm2
    with pytest.raises(SystemExit, match="'smollm3' is neither one of smollm2, retrieval"):
        models.path("smollm3")


def test_cache_makes_damaged_folders_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_KTX_CACHE", str(tmp_path))
    made = []

    def build(folder):
        made.append(folder)
        (folder / "weights").write_text("1234")

    folder = cache.prepared("thing", {"version": 1}, build)
    assert cache.prepared("thing", {"version": 1}, build) == folder and len(made) == 1
    (folder / "weights").write_text("4321")  # same size: only the checksum tells
    cache.prepared("thing", {"version": 1}, build)
    assert len(made) == 1
    cache.prepared("thing", {"version": 1}, build, verify=True)
    assert len(made) == 2 and (folder / "weights").read_text() == "1234"
    cache.prepared("thing", {"version": 2}, build)
    assert len(made) == 3


def test_a_failed_build_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_KTX_CACHE", str(tmp_path))

    def build(folder):
        (folder / "half").write_text("x")
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError):
        cache.prepared("thing", {}, build)
    assert [path.name for path in tmp_path.iterdir()] == [".thing.lock"]
