"""Prompts hold what they promise: distinct keys, answers where the positions say."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.tasks import dense_recall, needle, text_needles


@given(length=st.integers(200, 3000), vocab=st.sampled_from([64, 256, 512]), seed=st.integers(0, 9))
def test_dense_recall_asks_for_records_that_are_there_once(length, vocab, seed):
    task = dense_recall(length, vocab, queries=8, seed=seed)
    assert length - 4 < len(task.ids) <= length
    pairs = list(zip(task.ids, task.ids[1:], strict=False))
    for position, answer in zip(task.positions, task.answers, strict=True):
        key = pairs[position - 1]
        first = pairs.index(key)
        assert pairs.count(key) == 2 and first < position - 1
        assert task.ids[first + 2] == answer == task.ids[position + 1]


def test_dense_recall_fills_128k_with_vocab_512():
    task = dense_recall(131072, 512, queries=64)
    keys = {(a, b) for a, b in zip(task.ids, task.ids[1:], strict=False) if a < 128 <= b < 384}
    assert len(keys) == (131072 - 3 * 64) // 4


def test_dense_recall_names_what_is_too_small():
    with pytest.raises(ValueError, match="length=64.*queries=20.*raise length"):
        dense_recall(64, 256, queries=20)


@pytest.mark.parametrize("depth", [0, 0.3, 1])
def test_needle_is_at_its_depth_and_the_prompt_ends_in_its_key(depth):
    task = needle(1000, 256, depth)
    prompt = task.prompt(0)
    assert len(prompt) == 1000
    at = next(i for i in range(1000) if prompt[i : i + 2] == prompt[-2:])
    assert abs(at / 1000 - depth) < 0.02
    assert prompt[at + 2 : at + 7] == task.answers == task.ids[1000:]


def test_needle_refuses_a_depth_outside_the_context():
    with pytest.raises(ValueError, match="depth=1.5"):
        needle(1000, 256, 1.5)


def test_text_needles_hides_one_fact_for_each_question():
    task = text_needles("A line of text.\n" * 100, chars=1600, needles=3)
    assert len(task.questions) == 3
    for question, answer in zip(task.questions, task.answers, strict=True):
        colour = question.split()[-2]
        assert f"the {colour} box is {answer}." in task.context
