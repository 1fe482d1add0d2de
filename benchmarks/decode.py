"""Decode: one query token behind a long context, KTX pages against vLLM's own CPU attention.

python -m benchmarks.decode --context 8192,131072 --format k4v4
python -m benchmarks.decode --context 131072 --mode sparse --scoring header
"""

from __future__ import annotations

from . import harness


def main(argv: list[str] | None = None) -> None:
    harness.main(harness.parser(__doc__.splitlines()[0], context="8192"), lambda args: 1, argv)


if __name__ == "__main__":
    main()
