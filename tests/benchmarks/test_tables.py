"""The figures of README.md and docs/ are those of the committed results."""

import pytest

from benchmarks import tables


@pytest.mark.parametrize("path", tables.documents(), ids=lambda path: path.name)
def test_texts_say_what_the_results_say(path):
    text = path.read_text()
    assert tables.insert(text, tables.documents()[path]) == text, "run python -m benchmarks.tables"


def test_missing_markers_are_named():
    with pytest.raises(ValueError, match="no markers"):
        tables.insert("# A readme", "table")


def test_every_run_is_named_with_its_load():
    runs = [{"hardware": "X", "command": "a", "load_average": 1.5}, {"hardware": "X", "command": "b"}]
    assert tables.source(*runs, runs[0]) == "X, load average 1.5, not recorded, 1.5; `a`, `b`."
