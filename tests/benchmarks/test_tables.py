"""The README's figures are those of the committed results."""

import pytest

from benchmarks import tables


def test_readme_says_what_the_results_say():
    text = (tables.ROOT / "README.md").read_text()
    assert tables.insert(text, tables.render()) == text, "run python -m benchmarks.tables"


def test_missing_markers_are_named():
    with pytest.raises(ValueError, match="no markers"):
        tables.insert("# A readme", "table")
