"""The page-selection benchmark on a small model: its figures hold together, and its JSON is the last line."""

import json

import pytest
import torch

from benchmarks import probe, selection
from vllm_ktx.attention_backends.selection import SCORERS


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_retrieval_model(retrieval_small, capsys):
    selection.main(["--model", str(retrieval_small), "--context", "4096", "--json"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(result["scorers"]) == set(SCORERS)
    oracle, cascade = result["scorers"]["oracle"], result["scorers"]["cascade"]
    assert oracle["recall"] == oracle["needle_recall"] == 1.0
    assert oracle["claimed"] == oracle["reached"]
    assert cascade["codes_read_median"] == 1.0  # near-random keys: headers are not trusted
    assert cascade["needle_recall"] == 1.0 and cascade["reached"] > 0.94
    assert result["scorers"]["mean"]["recall_weighted"] < 0.9


def test_too_short_a_context_says_so(retrieval_small):
    with pytest.raises(SystemExit, match="--context 1024: too short"):
        selection.main(["--model", str(retrieval_small), "--context", "1024"])


def test_needles_are_where_their_answers_are(smollm2):
    prompt = probe.text_prompt(smollm2, selection.corpus.text("topics"), 2048, 512, rows=4, needles=3)
    assert 1800 < len(prompt.ids) <= 2048 and len(prompt.asked) == 3
    for row, position in prompt.needles.items():
        assert prompt.ids[row + 1] == prompt.ids[position]
    assert {row for rows in prompt.asked for row in rows} == set(prompt.needles) <= set(prompt.rows.tolist())
    task = probe.recall_prompt(vocab=256, context=1024, questions=5)
    assert len(task.needles) == 5
    for row, position in task.needles.items():
        assert task.ids[position - 2 : position] == task.ids[row - 1 : row + 1]
