"""Chunked prefill: one chunk of fresh tokens behind a long context, KTX pages against vLLM's own CPU attention.

python -m benchmarks.prefill --context 32768 --chunk 2048 --format k4v4
python -m benchmarks.prefill --context 131072 --mode sparse --scoring header --no-dense-too
"""

from __future__ import annotations

from . import harness


def main(argv: list[str] | None = None) -> None:
    options = harness.parser(__doc__.splitlines()[0], context="8192")
    options.add_argument("--chunk", type=int, default=2048, help="fresh tokens")
    harness.main(options, lambda args: args.chunk, argv)


if __name__ == "__main__":
    main()
