"""Haystacks and the figures made of their answers, on made-up numbers; one run of the sparse mode, marked slow."""

import json

import pytest

from benchmarks import needles, quality, sparsity
from benchmarks.needles import DEPTHS, Answers, Haystack


class Words:
    """A tokenizer of one token a character."""

    def __call__(self, text, add_special_tokens):
        return type("Encoded", (), {"input_ids": [ord(c) for c in text]})


def decode(ids):
    return "".join(map(chr, ids))


@pytest.mark.parametrize("length", [1200, 3000])
def test_a_text_haystack_holds_each_fact_at_its_depth_and_asks_for_it(length):
    found = needles.text_haystack(Words(), [ord("-")] * length, length, seed=3)
    assert len(found.ids) == length
    assert sorted(found.depths) == list(DEPTHS)
    filler = found.ids.count(ord("-"))
    text = decode(found.ids)
    for depth, (start, end) in zip(found.depths, found.spans, strict=True):
        number, question = text[start:end], text[:start].rsplit("\n\n", 1)[1]
        fact = question.split("Answer: ")[1] + number + "."
        assert text[: text.index(fact)].count("-") == round(depth * filler)


def test_too_short_a_haystack_is_refused():
    with pytest.raises(SystemExit, match="has no room for 5 needles"):
        needles.text_haystack(Words(), [ord("-")] * 99, 99, seed=0)


def haystacks(lengths=(100, 200)):
    return [Haystack(n, [], list(DEPTHS), [(0, 1)] * 5) for n in lengths for _ in range(2)]


def test_differences_are_paired_and_leave_out_prompts_that_fit_the_window():
    found = haystacks()
    base = [Answers([1.0, 2.0, 3.0, 4.0, 5.0], [True, True, True, True, False])] * 4
    ours = [*base[:2], Answers([1.0, 2.0, 3.0, 4.0, 5.5], [True] * 5)]
    ours.append(Answers([1.0, 2.0, 3.0, 4.0, 5.5], [False, True, True, True, False]))
    lost = needles.difference(found, ours, base, beyond=150)
    assert lost["needles"] == 10 and lost["nats"] == pytest.approx(0.1)
    assert lost["worst_cell"] == {"length": 200, "depth": 1.0, "nats": 0.5}
    assert lost["flipped"] == [1, 1]
    assert lost["answerable"] == {"nats": 0.0, "nats_stderr": 0.0, "needles": 8}
    assert needles.difference(found, ours, base, beyond=200) == {}


def test_the_heat_map_is_a_png(tmp_path):
    found = needles.figures(haystacks(), [Answers([0.1, 0.2, 0.3, 0.4, 5.0], [True] * 4 + [False])] * 4)
    assert found["nats"][4] == [5.0, 5.0] and found["accuracy"][4] == [0.0, 0.0] and found["needles_per_cell"] == 2
    needles.heat_map({"one": found, "two": found}, tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_lengths_halve_up_to_the_context():
    assert sparsity.lengths(8192) == [1024, 2048, 4096, 8192]


@pytest.mark.e2e
@pytest.mark.slow
def test_sparse_mode_on_the_retrieval_model(capsys):
    ktx = json.dumps({"window": 256, "min_pages": 2})
    quality.main(
        ["--model", "retrieval-small", "--mode", "sparse", "--format", "k4v4", "--context", "2048", "--tokens", "2048"]
        + ["--needles", "1", "--ktx", ktx, "--json"]
    )
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    first = found["rows"][0]
    assert first["pages"]["read"] < first["pages"]["context"] / 2
    assert first["needles"]["mean_accuracy"] == 1.0
    assert abs(first["vs_dense"]["perplexity"]["all"]["change"]) < 1e-3
