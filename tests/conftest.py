"""What every test gets: an environment without network or usage reports, set before torch and vLLM are imported, and
the folders of the prepared models (made on first use, cached after that)."""

import os
import tempfile
from pathlib import Path

import pytest

# Settings of a test's process, inherited by the engines it spawns; a value from outside wins.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # In-process engines start in a third of the time; a test of the spawned path sets 1 by monkeypatch.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # One thread: on a loaded machine two that wait for each other cost many times what they gain.
    "OMP_NUM_THREADS": "1",
    # Threads that wait sleep instead of spinning: on a shared machine spinning costs more than it gains.
    "OMP_WAIT_POLICY": "passive",
    "TOKENIZERS_PARALLELISM": "false",
    # `auto` must not depend on what this user probed.
    "VLLM_KTX_PROBES": os.path.join(tempfile.gettempdir(), f"ktx-probes-of-tests-{os.getpid()}"),
}
for name, value in ENVIRONMENT.items():
    os.environ.setdefault(name, value)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, a real model of 8K context."""
    from benchmarks import models

    return models.path("smollm2")


@pytest.fixture(scope="session")
def retrieval() -> Path:
    """The constructed retrieval model with head_dim 128 and 2 kv heads."""
    from benchmarks import models

    return models.path("retrieval")


@pytest.fixture(scope="session")
def retrieval_small() -> Path:
    """The constructed retrieval model with head_dim 64 and 1 kv head."""
    from benchmarks import models

    return models.path("retrieval-small")
