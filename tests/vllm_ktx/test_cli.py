"""`vllm-ktx doctor` on a good installation, and on one without kernels."""

from vllm_ktx import cli
from vllm_ktx.attention_backends.cpu import native


def test_doctor_finds_this_installation_in_order(capsys):
    code = cli.main(["doctor"])
    out = capsys.readouterr().out
    assert "ok    vLLM" in out and "ok    plugin" in out
    assert code == (0 if native.load() else 1)
    assert native.load() is None or "of the reference" in out


def test_doctor_says_what_to_do_without_kernels(capsys, monkeypatch):
    monkeypatch.setattr(native, "load", lambda: None)
    assert cli.main(["doctor"]) == 1
    assert "FAIL  kernels   native CPU kernels not built" in capsys.readouterr().out
