"""The disk benchmark runs, and reports what it says it does."""

import json
import shutil

import pytest

from benchmarks import disk


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio isn't installed")
def test_it_compares_with_fio(tmp_path, capsys) -> None:
    disk.main(
        [
            "--folder",
            str(tmp_path),
            "--gib",
            "0.0625",
            "--page-kib",
            "64",
            "--seconds",
            "0.2",
            "--rounds",
            "1",
            "--json",
        ]
    )
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    row = document["results"][0]
    assert row["page_bytes"] == 65536 and document["hardware"]
    assert row["read_ratio"] == pytest.approx(row["read_mb_s"] / row["fio_read_mb_s"])
    assert min(row["read_mb_s"], row["write_mb_s"], row["fio_write_mb_s"], row["merged_write_mb_s"]) > 0
    assert not list(tmp_path.iterdir())


def test_without_fio_it_says_what_to_install(monkeypatch, capsys) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(SystemExit):
        disk.main([])
    assert "apt-get install fio" in capsys.readouterr().err
