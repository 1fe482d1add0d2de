"""English text is there offline; R's file format is read right; a machine without apt is told what to do."""

import struct
import zlib

import pytest

from benchmarks import corpus


def xdr_entry(lines):
    body = b"X\n" + struct.pack(">iiii", 3, 0x00040201, 0x00030500, 5) + b"UTF-8" + struct.pack(">ii", 16, len(lines))
    for line in lines:
        body += struct.pack(">ii", 0x00040009, len(line.encode())) + line.encode()
    return struct.pack(">i", len(body)) + zlib.compress(body)


def test_topics_are_english_and_long_enough_for_perplexity():
    text = corpus.text("topics")
    assert len(text) > 400_000
    assert text.count(" the ") > 2000


def test_read_rdb_reads_entry_after_entry():
    first, second = ["EMMA", "", "by Jane Austen"], ["Persuasion", "naïve"]
    assert list(corpus.read_rdb(xdr_entry(first) + xdr_entry(second))) == [first, second]


def test_read_rdb_refuses_other_objects():
    with pytest.raises(ValueError, match="not a character vector"):
        list(corpus.read_rdb(struct.pack(">i", 9) + zlib.compress(b"X\n" + b"\0" * 40)))


def test_without_apt_the_message_names_a_way_out(monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_KTX_CACHE", str(tmp_path))
    monkeypatch.setattr(corpus.shutil, "which", lambda tool: None)
    with pytest.raises(SystemExit, match="apt-get and dpkg-deb.*use the text 'topics'"):
        corpus.text("emma")


def test_unknown_text_lists_the_known():
    with pytest.raises(SystemExit, match="'moby' is not one of topics, austen, emma"):
        corpus.text("moby")


@pytest.mark.slow
def test_the_six_novels():
    assert "Mr. Darcy" in corpus.text("pride-and-prejudice")
    assert len(corpus.text("austen")) > 4_000_000
