"""vLLM-KTX: a memory management unit beneath vLLM's block table (long contexts on small devices)."""

__version__ = "0.1.0"


def register() -> None:
    """Called by vLLM in every process, through the `vllm.general_plugins` entry point."""
    from .plugin import register as register_plugin

    register_plugin()
