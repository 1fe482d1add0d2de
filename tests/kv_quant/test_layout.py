"""The page format's arithmetic: sections don't overlap, sizes are what the design states, bad shapes are named."""

import itertools

import pytest

from vllm_ktx.kv_quant.formats import PRESETS, SCALE_METHODS, KVFormat, parse_format
from vllm_ktx.kv_quant.layout import ALIGN, PageLayout

FORMATS = [
    KVFormat("t", k_bits, v_bits, k_method, v_method)
    for k_bits, v_bits, k_method, v_method in itertools.product((4, 8), (4, 8), SCALE_METHODS, SCALE_METHODS)
]


@pytest.mark.parametrize("shape", [(32, 1, 16), (64, 3, 80), (128, 8, 128), (64, 2, 256)])
def test_sections_are_aligned_and_apart(shape):
    for fmt in FORMATS:
        layout = PageLayout(fmt, *shape)
        end = 0
        for section in layout.sections.values():
            assert section.offset % ALIGN == 0
            assert section.offset >= end
            end = section.offset + section.head_bytes * layout.num_kv_heads
        assert end <= layout.payload_bytes < end + ALIGN
        assert layout.page_bytes % layout.page_size == 0


def test_every_code_has_its_bits():
    for fmt in FORMATS:
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
