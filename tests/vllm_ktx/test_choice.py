"""What `auto` and explicit formats become, with and without a stored probe; and what makes two models the same."""

import json
import logging
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_ktx.choice import choose_format
from vllm_ktx.config import KtxConfig
from vllm_ktx.plugin import settle_format
from vllm_ktx.probe import store


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A folder with weights, and an empty store."""
    monkeypatch.setenv("VLLM_KTX_PROBES", str(tmp_path / "probes"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    torch.manual_seed(0)
    save_file({f"layer.{i}": torch.randn(300, 200) for i in range(4)}, folder / "model.safetensors")
    return folder


def decide(model, fmt="k4v4", s_tok=1.0, **changes):
    order = ["k4v4", "k8v4", "k8v8"]
    kl = dict(zip(order, (4e-3, 1e-3, 3e-5), strict=True))
    rows = [{"format": f, "worst": kl[f], "safe": order.index(f) >= order.index(fmt) if fmt in order else False}
            for f in order]  # fmt: skip
    digest = store.model_hash(model)
    store.save(store.Decision(str(model), digest, fmt, 2e-3, 64, rows, [{"s_tok": s_tok}], **changes))


def choose(model, settings=None, cache_dtype="auto", page_size=64):
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(model=str(model), revision=None),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        load_config=SimpleNamespace(download_dir=None),
    )
    config = choose_format(vllm_config, KtxConfig.parse(settings), page_size)
    return config.kv_format(cache_dtype).name


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO, logger="vllm.ktx")
    logging.getLogger("vllm").propagate, before = True, logging.getLogger("vllm").propagate
    yield lambda: "\n".join(f"{r.levelname} {r.getMessage()}" for r in caplog.records)
    logging.getLogger("vllm").propagate = before


def test_auto_without_a_probe_is_the_safe_preset_and_says_so(model, said):
    assert choose(model) == "k8v4"
    assert "INFO KTX: format k8v4 (auto): `vllm-ktx probe` has not measured this model" in said()
    assert choose("no/such-model") == "k8v4" and "weights are not on this disk yet" in said()


@pytest.mark.parametrize("fmt", ["k4v4", "k8v8", "none"])
def test_auto_takes_the_probes_choice(model, said, fmt):
    decide(model, fmt)
    assert choose(model) == fmt
    assert f"INFO KTX: format {fmt} (auto):" in said() and "stored probe" in said()
    assert choose(model, {"format": {"default": "auto", "layers": {"0": "none"}}}) == fmt


def test_auto_uses_a_probe_only_for_what_it_measured(model, said):
    decide(model, "k4v4")
    assert choose(model, page_size=32) == "k4v4"
    assert choose(model, page_size=128) == "k8v4" and "measured pages of 64 tokens, not 128" in said()
    assert choose(model, {"value_scale": "per_head"}) == "k8v4" and "knows nothing of ktx.value_scale" in said()
    assert choose(model, cache_dtype="int8_per_token_head") == "k8v8"


def test_an_explicit_format_over_the_bound_is_a_loud_warning(model, said):
    assert choose(model, {"format": "k4v4"}) == "k4v4" and said() == ""
    decide(model, "k8v4")
    assert choose(model, {"format": "k8v8"}) == "k8v8" and said() == ""
    assert choose(model, {"format": "k4v4"}) == "k4v4"
    assert "WARNING KTX: ktx.format='k4v4' is UNSAFE for this model" in said() and "4.0e-03 nats" in said()
    assert choose(model, cache_dtype="int4_per_token_head") == "k4v4" and said().count("UNSAFE") == 2


def test_per_token_int4_keys_are_screened(model, said):
    wanted = {"format": "k4v4", "key_scale": "per_token"}
    choose(model, wanted)
    assert "this one has not been screened" in said()
    decide(model, "k4v4", s_tok=2.4)
    choose(model, wanted)
    assert "has key outliers (s_tok 2.4 in the worst layer, over 1.5)" in said()
    assert said().count("WARNING") == 2
    decide(model, "k4v4", s_tok=1.0)
    choose(model, wanted)
    assert said().count("WARNING") == 2


def test_a_damaged_file_is_said_and_not_used(model, said):
    decide(model, "k4v4")
    (file,) = store.store_dir().iterdir()
    file.write_text(file.read_text()[:40])
    assert choose(model) == "k8v4" and "can't be read and is not used" in said()
    file.write_text(json.dumps({"version": 0}))
    assert choose(model) == "k8v4"


def test_damaged_weights_are_left_to_the_loader(model, said):
    (model / "model.safetensors").write_bytes((20).to_bytes(8, "little") + b"{not json, not at all}")
    assert choose(model) == "k8v4" and "the model's files can't be read" in said()


def test_the_hash_knows_a_copy_and_a_fine_tune(model, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    assert store.model_hash(copy) == store.model_hash(model)
    tensors = load_file(copy / "model.safetensors")
    tensors["layer.2"] *= 1.001
    save_file(tensors, copy / "model.safetensors")
    assert (copy / "model.safetensors").stat().st_size == (model / "model.safetensors").stat().st_size
    assert store.model_hash(copy) != store.model_hash(model)
    (model / "config.json").write_text("{}")
    before = store.model_hash(model)
    (model / "model.safetensors").unlink()
    assert before is not None and store.model_hash(model) is None


def test_the_hash_tells_the_outlier_variants_apart(smollm2, tmp_path):
    from benchmarks.models import fold_key_outliers

    folded = fold_key_outliers(smollm2, tmp_path / "folded", 8)
    assert store.model_hash(folded) not in (None, store.model_hash(smollm2))


def test_no_more_dense_layers_than_the_model_has(model):
    layers = SimpleNamespace(get_head_size=lambda: 64, get_total_num_hidden_layers=lambda: 2)
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(model=str(model), revision=None, **vars(layers)),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        load_config=SimpleNamespace(download_dir=None),
        additional_config={},
    )
    settle_format(vllm_config, KtxConfig(dense_layers=2), 64)
    with pytest.raises(ValueError, match="ktx.dense_layers=3: the model has 2 layers, use as many or fewer"):
        settle_format(vllm_config, KtxConfig(dense_layers=3), 64)
