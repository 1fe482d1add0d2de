"""The command line of `vllm-ktx serve`: ours, vLLM's, and what can't go together."""

import sys

import pytest

from vllm_ktx import cli
from vllm_ktx.serving import options
from vllm_ktx.serving.options import ServeOptions, parse


def test_what_is_not_ours_is_vllms():
    found = parse(["some/model", "--replicas", "2", "--max-model-len", "4096", "--port", "9000", "--api-key=k"])
    assert (found.replicas, found.port) == (2, 9000)
    assert found.arguments == ("some/model", "--max-model-len", "4096", "--api-key=k", "--attention-backend", "ktx")
    one = parse(["m", "--port", "9000", "--attention-backend", "CPU_ATTN"])
    assert one.arguments == ("m", "--attention-backend", "CPU_ATTN", "--host", "0.0.0.0", "--port", "9000")


@pytest.mark.parametrize(
    "option", ["--attention_backend", "--attention-config.backend", "--attention_config.backend=X", "-ac.backend"]
)
def test_a_named_backend_stays_however_it_is_spelled(option):
    assert "ktx" not in parse(["m", option, "FLASH_ATTN"]).arguments
    assert parse(["m", "--attention_config.flash_attn_version", "3"]).arguments[1:5] == (
        *("--attention-config.flash_attn_version", "3", "--attention-backend", "ktx"),
    )


def test_one_replica_is_vllm_serve_itself_and_needs_no_ray(monkeypatch):
    became = []
    monkeypatch.setattr("os.execv", lambda path, argv: became.append(argv) or (_ for _ in ()).throw(SystemExit))
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SystemExit):
        cli.main(["serve", "model", "--dtype", "float32"])
    server = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", "model", "--dtype", "float32"]
    assert became == [[*server, "--attention-backend", "ktx", "--host", "0.0.0.0", "--port", "8000"]]


def test_two_replicas_without_ray_name_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "ray.serve", None)
    assert cli.main(["serve", "model", "--replicas", "2"]) == 2
    assert "pip install -e '.[ray]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["m", "--replicas", "0"], "--replicas 0: use a whole number, 1 or more"),
        (["m", "--max-body-mib", "0"], "--max-body-mib 0"),
        (["m", "--replicas", "2", "--ssl-keyfile=x"], "--ssl-keyfile is about the public address"),
        (["m", "--replicas", "2", "--root_path", "/x"], "--root-path is about the public address"),
        (["m", "--replicas", "2", "--drain_seconds", "nan"], "--drain-seconds nan: use a number, 0 or more"),
    ],
)
def test_errors_name_the_option(argv, message, capsys):
    assert cli.main(["serve", *argv]) == 2
    assert message in capsys.readouterr().err


def test_options_of_several_replicas_are_not_ignored_in_silence(capsys):
    assert parse(["m", "--drain-seconds", "5", "--attempts=2", "--port", "1"]).drain_seconds == 5
    expected = "vllm-ktx serve: --attempts, --drain-seconds do nothing without --replicas above 1\n"
    assert capsys.readouterr().err == expected
    parse(["m"]), parse(["m", "--replicas", "2", "--drain-seconds", "5"])
    assert capsys.readouterr().err == ""


def test_settings_of_a_yaml_file():
    found = ServeOptions.of({"arguments": ["m", "--max-model-len", 4096], "replicas": 3})
    assert found.arguments == ("m", "--max-model-len", "4096", "--attention-backend", "ktx")
    with pytest.raises(ValueError, match="'replica' is not a setting of vllm-ktx serve"):
        ServeOptions.of({"replica": 3})


def test_what_ray_reserves(monkeypatch):
    monkeypatch.setattr(options, "is_cpu_build", lambda: False)
    assert ServeOptions(("m", "-tp", "2", "--pipeline-parallel-size=2")).gpus == 4
    assert parse(["m", "--replicas", "2", "--tensor_parallel_size", "4"]).gpus == 4
    assert ServeOptions.of({"arguments": ["m", "--tensor_parallel_size=4"]}).gpus == 4
    assert ServeOptions(("m",)).gpus == 1 and ServeOptions(("m",), replica_gpus=0.5).gpus == 0.5
    assert ServeOptions(("m",)).server_environment() == {}
    monkeypatch.setattr(options, "is_cpu_build", lambda: True)
    assert ServeOptions(("m",)).gpus == 0
    assert ServeOptions(("m",), replicas=2).server_environment()["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
