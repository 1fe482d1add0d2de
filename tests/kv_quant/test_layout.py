"""The page format's arithmetic: sections don't overlap, sizes are what the design states, bad shapes are named."""

import itertools

import pytest

from vllm_ktx.kv_quant.formats import PRESETS, KVFormat, parse_format
from vllm_ktx.kv_quant.layout import ALIGN, PageLayout
from vllm_ktx.kv_quant.scale_methods import SCALE_BITS, SCALE_METHODS

FORMATS = [
    KVFormat("t", k_bits, v_bits, k_method, v_method, scale_bits=scale_bits)
    for k_bits, v_bits, k_method, v_method, scale_bits in itertools.product(
        (4, 8), (4, 8), SCALE_METHODS, SCALE_METHODS, SCALE_BITS
    )
]


def fitting(page_size, head_dim):
    return [
        f for f in FORMATS if not any(SCALE_METHODS[m].problem(page_size, head_dim) for m in (f.k_method, f.v_method))
    ]


@pytest.mark.parametrize("shape", [(32, 1, 16), (64, 3, 80), (128, 8, 128), (64, 2, 256)])
def test_sections_are_aligned_and_apart(shape):
    formats = fitting(shape[0], shape[2])
    assert len(formats) in (len(FORMATS), len(FORMATS) * 16 // 25)
    for fmt in formats:
        layout = PageLayout(fmt, *shape)
        end = 0
        for section in layout.sections.values():
            assert section.offset % ALIGN == 0
            assert section.offset >= end
            end = section.offset + section.head_bytes * layout.num_kv_heads
        assert end <= layout.payload_bytes < end + ALIGN
        assert layout.page_bytes % layout.page_size == 0


def test_every_code_has_its_bits():
    for fmt in fitting(64, 80):
        sections = PageLayout(fmt, 64, 2, 80).sections
        keys = sum(sections[name].head_bytes for name in sections if name.startswith(("k_plane", "k_low")))
        assert keys * 8 == 64 * 80 * fmt.k_bits
        assert sections["v_codes"].head_bytes * 8 == 64 * 80 * fmt.v_bits


def test_scoring_prefix_is_scales_and_the_first_plane():
    layout = PageLayout(PRESETS["k4v4"], 64, 8, 128)
    assert list(layout.sections)[:3] == ["k_scale", "k_min", "k_plane0"]
    assert layout.scoring_bytes == layout.sections["k_plane1"].offset


@pytest.mark.parametrize(("name", "share"), [("k8v8", 0.53), ("k8v4", 0.40), ("k4v4", 0.28), ("none", 1.0)])
def test_share_of_bf16(name, share):
    layout = PageLayout(PRESETS[name], 64, 8, 128)
    assert layout.payload_bytes / layout.dense_bytes == pytest.approx(share, abs=0.012)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((48, 1, 64), "block_size"), ((0, 1, 64), "block_size"), ((64, 1, 60), "head_dim"), ((64, 0, 64), "num_kv_heads")],
)
def test_impossible_shapes_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        PageLayout(PRESETS["k4v4"], *arguments)


def test_parse_format():
    assert parse_format("k4v4", k_method="per_token").k_method == "per_token"
    assert parse_format("none", k_method="per_token") == PRESETS["none"]
    with pytest.raises(ValueError, match="did you mean 'k4v4'"):
        parse_format("k4v5")
    with pytest.raises(ValueError, match="both or for neither"):
        KVFormat("t", 16, 4)


def test_a_group_that_doesnt_fit_names_the_setting_and_another():
    with pytest.raises(ValueError, match="value_scale='per_token_32': .*head_dim 80 .*; use 'per_token'"):
        PageLayout(parse_format("k4v4", v_method="per_token_32"), 64, 2, 80)


@pytest.mark.parametrize(
    ("settings", "bits"),
    [
        ({}, 4.5),
        ({"k_method": "per_token"}, 4.5),
        ({"k_method": "per_head"}, 4.25),
        ({"k_method": "per_channel_32", "v_method": "per_token_32"}, 5.0),
        ({"scale_bits": 8}, 4.262),
    ],
)
def test_bits_a_value_with_scales(settings, bits):
    """Of one kv head's keys and values, without rounding to cache lines."""
    sections = PageLayout(parse_format("k4v4", **settings), 64, 1, 64).sections
    assert sum(s.head_bytes for s in sections.values()) * 8 / (2 * 64 * 64) == pytest.approx(bits, abs=0.005)
