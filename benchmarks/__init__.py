"""Benchmarks and the material they run on: one command a figure, results as JSON. Never imported by the plugin."""

import importlib.util
from pathlib import Path

import vllm_ktx

if importlib.util.find_spec("vllm_ktx.attention_backends") is None:  # a checkout that isn't installed
    vllm_ktx.__path__.append(str(Path(__file__).parents[1]))
