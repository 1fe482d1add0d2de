"""Settings: defaults, errors that name the setting and the fix, and what follows from combinations."""

import dataclasses

import pytest

from vllm_ktx.config import KtxConfig


def sparse(settings, page_size=64):
    config = KtxConfig.parse(settings)
    return config.sparse_settings(config.kv_format(), page_size)


def test_everything_has_a_default():
    config = KtxConfig.parse(None)
    assert config.kv_format().name == "k8v4"
    assert sparse({}).window == 4096 and sparse({}).scoring == "cascade"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fromat": "k4v4"}, "ktx.fromat is not a setting of KTX; did you mean 'format'"),
        ({"format": "k4"}, "ktx.format='k4': use one of none, k8v8, k8v4, k4v4, auto"),
        ({"format": {"default": "k4v4"}}, "ktx.format=.*: use a name, or by layer"),
        ({"format": {"default": "k4v4", "layers": {"1-0": "k8v4"}}}, "has the key '1-0': use a layer or a range"),
        (
            {"format": {"default": "k4v4", "layers": {"0": "k8"}}},
            r"ktx.format.layers\['0'\]='k8': use one of none",
        ),
        ({"format": {"default": "k4", "layers": {}}}, "ktx.format.default='k4'"),
        ({"format": {"default": "k4v4", "layers": {"0-3": "k8v4", "2": "k8v8"}}}, "names layer 2 twice"),
        ({"kernels": True}, "ktx.kernels=True: use one of auto, native, torch"),
        (
            {"prefill_kernel": "xformer"},
            "ktx.prefill_kernel='xformer': use one of auto, triton.*did you mean 'xformers'",
        ),
        ({"cudagraph": "none"}, "ktx.cudagraph='none': use one of piecewise, full"),
        ({"cudagraph": "full", "audit_rate": 0.1}, "ktx.audit_rate=0.1: a step in a CUDA graph .* to 'piecewise'"),
        ({"key_scale": "per_chanel"}, "ktx.key_scale='per_chanel'.*did you mean 'per_channel'"),
        ({"rotate_keys": "yes"}, "ktx.rotate_keys='yes': use true or false"),
        ({"scale_bits": 4}, "ktx.scale_bits=4: use one of 16, 8"),
        ({"format": "none", "scale_bits": 8}, "ktx.scale_bits has no meaning for ktx.format='none'"),
        ({"residual_pages": 99}, "ktx.residual_pages=99: use a whole number from 0 to 16"),
        ({"attention": "dens"}, "did you mean 'dense'"),
        ({"dense_layers": -1}, "ktx.dense_layers=-1: use a whole number, 0 or more"),
        ({"audit_rate": 2}, "ktx.audit_rate=2: use a number from 0 to 1"),
        ({"window": 1000}, "ktx.window=1000 is not a multiple of the page size 64 .*use 1024"),
        ({"coverage": 1.5}, "ktx.coverage=1.5: use a number above 0 and up to 1"),
        ({"coverage": 0.9, "format": "none"}, "ktx.coverage=0.9 does nothing without sparse attention"),
        ({"attention": "sparse", "format": "none"}, "needs page headers: choose a quantized ktx.format"),
        ({"key_scale": "per_token", "scoring": "codes"}, "use ktx.scoring='header' or ktx.key_scale='per_channel'"),
        ({"min_pages": 200}, "raise ktx.max_pages to 200 or lower ktx.min_pages"),
        ({"top_k": 5, "select": "coverage"}, "set ktx.select='top_k' and a value for ktx.top_k, or leave both out"),
        ("k4v4", "must be a mapping"),
        ({"format": "none", "key_scale": "per_token"}, "ktx.key_scale has no meaning for ktx.format='none'"),
        ({"scheduler": "length-grouped"}, "did you mean 'length_grouped'"),
        ({"prefill_share": 0}, "ktx.prefill_share=0: use a number above 0 and up to 1"),
        ({"weights": "prefetched"}, "ktx.weights='prefetched': use one of resident, prefetch; did you mean"),
        ({"eviction": "clock"}, "ktx.eviction='clock' does nothing without pages off the device .*ktx.host_gib"),
        ({"prefetch_layers": 3}, "ktx.prefetch_layers=3 does nothing without pages off the device"),
        ({"trace": True}, "ktx.trace=True does nothing without pages off the device"),
        ({"attention": "dense", "audit_rate": 0.1}, "ktx.audit_rate=0.1 does nothing without sparse attention"),
        ({"format": "none", "dense_layers": 2}, "ktx.dense_layers=2 does nothing without sparse attention"),
        ({"top_k": 4, "coverage": 0.5}, "ktx.coverage=0.5 does nothing without ktx.select='coverage'"),
        ({"global_ratio": 0.1, "max_pages": 64}, "ktx.max_pages=64 does nothing without ktx.select='coverage'"),
        ({"coverage": 1, "max_pages": 64}, "ktx.max_pages=64 does nothing without ktx.coverage below 1"),
        ({"scoring": "header", "share": 0.5}, "ktx.share=0.5 does nothing without ktx.scoring='cascade': add that, or"),
        ({"key_scale": "per_token", "share": 0.5}, "ktx.share=0.5 does nothing without ktx.scoring='cascade'"),
        ({"disk_gib": 1, "disk_dir": ""}, "ktx.disk_gib=1 needs ktx.disk_dir"),
        ({"host_gib": 1, "overcommit": float("nan")}, "ktx.overcommit=nan: use 'auto' or a number"),
        ({"host_gib": 1, "overcommit": float("inf")}, "ktx.overcommit=inf: use 'auto' or a number"),
        ({"max_pages": 2**33}, "ktx.max_pages=8589934592: use a whole number"),
    ],
)
def test_errors_name_setting_value_and_fix(settings, message):
    with pytest.raises(ValueError, match=message):
        sparse(settings)


def test_cache_dtypes_and_formats():
    assert KtxConfig().kv_format("int8_per_token_head").name == "k8v8"
    assert KtxConfig(format="k4v4").kv_format("int4_per_token_head").name == "k4v4"
    with pytest.raises(ValueError, match="contradicts --kv-cache-dtype int4_per_token_head"):
        KtxConfig(format="k8v8").kv_format("int4_per_token_head")


def test_formats_by_layer():
    config = KtxConfig.parse({"format": {"default": "auto", "layers": {"0-1": "k8v8", "7": "none"}}})
    assert config.is_auto() and not config.is_auto("int4_per_token_head")
    names = [config.with_default_format("k4v4").kv_format(layer=i).name for i in (None, 0, 1, 2, 7, 8)]
    assert names == ["k4v4", "k8v8", "k8v8", "k4v4", "none", "k4v4"]
    assert config.kv_format("int4_per_token_head", layer=3).name == "k4v4"
    assert config.layer_formats().last == 7 and KtxConfig().layer_formats().last == -1


def test_what_follows_from_combinations():
    assert sparse({"format": "none"}) is None
    assert sparse({"attention": "dense"}) is None
    assert sparse({"key_scale": "per_token"}).scoring == "header"
    assert sparse({"key_scale": "per_channel_32"}).scoring == "cascade"
    assert sparse({"top_k": 5}).select == "top_k"
    assert sparse({"global_ratio": 0.01}).select == "global_ratio"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"host_gib": 2, "overcommit": 1}, "KTX: ktx.host_gib=2 does nothing without ktx.overcommit above 1 or 'auto'"),
        (
            {"scheduler": "stock", "prefill_share": 0.1},
            "KTX: ktx.prefill_share=0.1 does nothing without ktx.scheduler='length_grouped'",
        ),
    ],
)
def test_what_scripts_switch_is_said_once(settings, message, monkeypatch):
    said = []
    monkeypatch.setattr("vllm_ktx.config.logger.warning", lambda text, *values: said.append(text % values))
    for _ in range(3):
        assert sparse(settings) is not None
    assert said == [message]


def test_defaults_never_complain():
    """Neither when left out nor when written out, whatever is chosen beside them."""
    written = {f.name: f.default for f in dataclasses.fields(KtxConfig) if f.default is not None}
    for chosen in ({}, {"attention": "dense"}, {"format": "none"}, {"top_k": 3}, {"scoring": "header"}):
        sparse(chosen)
        sparse(written | chosen)
