"""What KTX refuses on CUDA, each by name with what to do. No GPU is needed: the platform is made up."""

from types import SimpleNamespace

import pytest
from vllm.platforms.interface import DeviceCapability

from vllm_ktx.attention_backends.ktx import KTXBackend
from vllm_ktx.config import KtxConfig
from vllm_ktx.kv_quant import SCALE_METHODS, ScaleMethod
from vllm_ktx.plugin import unsupported_on_device


def platform(capability=(8, 6), cuda=True):
    return SimpleNamespace(
        is_cuda=lambda: cuda,
        device_name="rocm",
        get_device_capability=lambda: DeviceCapability(*capability),
        get_device_name=lambda: "NVIDIA T4",
    )


def engine(v2=True, speculative=None, async_scheduling=True, dbo=False, pcp=1, cache_dtype="auto"):
    return SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        use_v2_model_runner=v2,
        speculative_config=speculative and SimpleNamespace(method=speculative),
        scheduler_config=SimpleNamespace(async_scheduling=async_scheduling),
        parallel_config=SimpleNamespace(enable_dbo=dbo, prefill_context_parallel_size=pcp),
    )


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.parametrize(
    ("ktx", "options"),
    [
        ({}, {}),
        ({"format": {"default": "k4v4", "layers": {"0-1": "none"}}, "kernels": "triton"}, {}),
        ({"key_scale": "per_channel_32", "value_scale": "per_token_32", "scale_bits": 8}, {}),
        ({"key_scale": "per_head", "rotate_keys": True, "scoring": "header"}, {"cache_dtype": "bfloat16"}),
        ({}, {"speculative": "ngram", "async_scheduling": False}),
        ({"host_gib": 4, "disk_gib": 4, "disk_dir": "/tmp"}, {}),
        ({"cudagraph": "full"}, {}),
    ],
)
def test_served(ktx, options):
    assert unsupported_on_device(engine(**options), KtxConfig.parse(ktx), platform()) == []


@pytest.mark.parametrize(
    ("ktx", "options", "reason", "fix"),
    [
        ({"kernels": "native"}, {}, "ktx.kernels='native'", "leave it out"),
        ({"kernels": "torch"}, {}, "ktx.kernels='torch'", "leave it out"),
        ({}, {"v2": False}, "V2 model runner", "unset VLLM_USE_V2_MODEL_RUNNER"),
        ({}, {"speculative": "ngram_gpu"}, "'ngram_gpu' with async scheduling", "--no-async-scheduling"),
        (
            {"cudagraph": "full"},
            {"speculative": "ngram", "async_scheduling": False},
            "steps of one token a row",
            "leave one of the two out",
        ),
        ({}, {"dbo": True}, "dual batch overlap", "leave --enable-dbo out"),
        ({}, {"pcp": 2}, "prefill context parallelism", "leave it out"),
    ],
)
def test_refused_by_name(ktx, options, reason, fix):
    (said,) = unsupported_on_device(engine(**options), KtxConfig.parse(ktx), platform())
    assert reason in said and fix in said


def test_a_scale_method_of_another_shape_is_refused_by_name(monkeypatch):
    monkeypatch.setitem(SCALE_METHODS, "blocks", ScaleMethod("blocks", 16, 16))
    (said,) = unsupported_on_device(engine(), KtxConfig.parse({"value_scale": "blocks"}), platform())
    assert "no CUDA kernels for scales blocks" in said and "leave ktx.key_scale and ktx.value_scale out" in said


def test_old_cards_other_platforms_and_the_interpreter_are_refused(monkeypatch):
    config = KtxConfig()
    (said,) = unsupported_on_device(engine(), config, platform((7, 5)))
    assert "NVIDIA T4 has compute capability 7.5" in said and "need 8.0" in said
    (said,) = unsupported_on_device(engine(), config, platform(cuda=False))
    assert "CUDA and on CPUs" in said and "rocm" in said
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    (said,) = unsupported_on_device(engine(), config, platform())
    assert "TRITON_INTERPRET=1" in said and "unset it" in said


def test_what_the_backend_tells_vllms_cuda_platform():
    assert not KTXBackend.supports_compute_capability(DeviceCapability(7, 5))
    assert all(KTXBackend.supports_compute_capability(DeviceCapability(*c)) for c in ((8, 0), (8, 9), (9, 0), (12, 0)))
    assert KTXBackend.supports_compute_capability(None), "a CPU"
    assert KTXBackend.get_preferred_block_size(16) == 64, "vLLM asks after the layers were made for that page size"
    assert not KTXBackend.supports_device_cpu_query_lens_mismatch()
