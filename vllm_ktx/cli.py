"""The `vllm-ktx` command.

`vllm-ktx doctor` says whether this installation can serve, and what to do if not; `vllm-ktx probe MODEL` measures which
page format fits a model; `vllm-ktx serve MODEL` serves it, with `--replicas N` several times behind one address.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable

from . import __version__
from .probe import command as probe

Check = tuple[str, Callable[[], tuple[bool, str]]]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="vllm-ktx", description="Long contexts on small devices, with stock vLLM.")
    parser.add_argument("--version", action="version", version=f"vllm-ktx {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="check this installation: vLLM's version, the plugin, the kernels")
    probe.add_options(commands.add_parser("probe", help="measure which page format fits a model, for ktx.format=auto"))
    commands.add_parser("serve", help="vllm serve with KTX, or --replicas N of it behind one address", add_help=False)
    given = sys.argv[1:] if argv is None else argv
    if given[:1] == ["serve"]:  # its options are mostly vLLM's
        return serve(given[1:])
    args = parser.parse_args(given)
    return probe.main(args) if args.command == "probe" else doctor()


def serve(argv: list[str]) -> int:
    """One replica: becomes `vllm serve`. More: runs them with Ray Serve until it is told to stop."""
    from .serving import options

    try:
        chosen = options.parse(argv)
    except ValueError as error:
        print(f"vllm-ktx serve: {error}", file=sys.stderr)
        return 2
    if chosen.replicas == 1:
        os.execv(chosen.command[0], [*chosen.command, *chosen.arguments])
    try:
        import ray.serve  # noqa: F401
    except ImportError:
        print(
            f"vllm-ktx serve: --replicas {chosen.replicas} needs Ray Serve: in the checkout of vLLM-KTX, "
            "pip install -e '.[ray]' (or use --replicas 1, which needs no Ray)",
            file=sys.stderr,
        )
        return 2
    from .serving import app

    return app.main(chosen)


def doctor() -> int:
    """Prints one line a check; returns 1 if any of them failed."""
    checks: list[Check] = [
        ("torch", check_torch),
        ("vLLM", check_vllm),
        ("plugin", check_plugin),
        ("kernels", check_kernels),
    ]
    good = True
    logging.disable(logging.WARNING)  # what matters is said here
    try:
        for name, check in checks:
            try:
                fine, text = check()
            except Exception as error:  # a broken import is what this command is for
                fine, text = False, f"{type(error).__name__}: {error}"
            good &= fine
            print(f"{'ok  ' if fine else 'FAIL'}  {name:<8}  {text}")
    finally:
        logging.disable(logging.NOTSET)
    return 0 if good else 1


def check_torch() -> tuple[bool, str]:
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU only"
    return True, f"{torch.__version__} ({device})"


def check_vllm() -> tuple[bool, str]:
    import vllm

    from . import _compat

    problem = _compat.vllm_version_problem()
    return problem is None, problem or vllm.__version__


def check_plugin() -> tuple[bool, str]:
    from importlib.metadata import entry_points

    from vllm.plugins import load_general_plugins
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    names = [point.name for point in entry_points(group="vllm.general_plugins") if point.value.startswith("vllm_ktx")]
    if not names:
        return False, "vLLM can't see the plugin: install the package (pip install -e .), don't just put it on the path"
    load_general_plugins()
    if "KTX" not in AttentionBackendEnum.__members__:
        return False, "KTX is not registered: is VLLM_PLUGINS set without 'ktx'?"
    return True, "vllm serve MODEL --attention-backend ktx"


def check_kernels() -> tuple[bool, str]:
    """Whether there are fast ones, and whether they are right here, on a layer of Llama-3.1-8B's kind."""
    import torch

    from .attention_backends.cpu.native import load
    from .attention_backends.kernels import select_kernels
    from .attention_backends.selection import SparseSettings
    from .attention_backends.self_check import self_check
    from .kv_quant import PageLayout, parse_format

    cuda, kernels = torch.cuda.is_available(), load()
    if not cuda and kernels is None:
        return False, "native CPU kernels not built; torch serves, slowly. Install g++ and run `pip install -e .` again"
    name = "triton" if cuda else f"{kernels.name}; available: {', '.join(kernels.available_isas())}"
    setup = (PageLayout(parse_format("k4v4"), 64, 2, 128), 8, torch.bfloat16, torch.device("cuda" if cuda else "cpu"))
    errors = self_check(select_kernels("triton") if cuda else kernels, *setup, SparseSettings(), paged=cuda)
    return True, f"{name}; outputs within {errors['sparse attention']:.1e} of the reference"


if __name__ == "__main__":
    sys.exit(main())
