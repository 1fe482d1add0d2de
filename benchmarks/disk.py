"""Throughput of the disk tier against fio: same file, block size and depth, in turns, in one run.

    python -m benchmarks.disk [--folder DIR] [--gib 1] [--page-kib 16,64] [--depth 64] [--json] [--save disk]

Both read pages in random order and write them in order, through io_uring with O_DIRECT. KTX's side is `DiskTier.read`
and `write` as the hot pool calls them: staging, checksums and the copies are in its time. Merging of neighbours is off
but for one more column, so that both sides issue the same transfers. fio is the Debian package of that name.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import RESULTS, environment, save
from vllm_ktx.offload import DiskTier, PageSpec
from vllm_ktx.offload.disk import MERGE_BYTES
from vllm_ktx.offload.io import ENGINES, make_engine

BATCH = 2048  # pages of one call: long enough that its start and end, where the queue is short, count for little
SMALL = 64  # pages of one call of the pool's fetch thread
TARGET = 0.8


def fio(disk: DiskTier, args: argparse.Namespace, page: int, write: bool) -> float:
    """MB/s of fio."""
    command = [
        "fio", "--name=ktx", f"--filename=/proc/{os.getpid()}/fd/{disk.fd}", f"--size={args.bytes}", f"--bs={page}",
        "--direct=1", f"--ramp_time={args.warm_up}",
        f"--rw={'write' if write else 'randread'}", "--ioengine=io_uring", f"--iodepth={args.depth}",
        "--output-format=json", "--time_based", f"--runtime={args.seconds}", "--overwrite=1", "--randrepeat=0",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"fio failed: {done.stderr.strip() or done.stdout.strip()}")
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["write" if write else "read"]
    return job["bw_bytes"] / 1e6


def tier(disk: DiskTier, args: argparse.Namespace, write: bool, rng: np.random.Generator, batch: int = BATCH) -> float:
    """MB/s of the tier in calls of `batch` pages; every page's content is checked by its checksum."""
    spec = disk.spec
    batch = min(batch, spec.num_blocks)
    rows, memory = np.arange(batch), rng.integers(0, 256, (batch, spec.page_bytes), dtype=np.uint8)
    moved, start, warm = 0, time.perf_counter(), args.warm_up > 0
    while True:
        order = np.arange(spec.num_blocks) if write else rng.permutation(spec.num_blocks)
        for first in range(0, spec.num_blocks - batch + 1, batch):
            if write:
                disk.write(order[first : first + batch], memory, rows)
            else:
                disk.read(order[first : first + batch], memory, rows)
            moved += batch * spec.page_bytes
            passed = time.perf_counter() - start
            if warm and passed >= args.warm_up:
                moved, start, warm = 0, time.perf_counter(), False
            elif not warm and passed >= args.seconds:
                return moved / passed / 1e6


def compare(folder: Path, args: argparse.Namespace, page: int) -> dict[str, Any]:
    """Medians over rounds of both, in turns, for one page size, and the least and most of each.

    Virtual disks and busy machines vary by a factor of two; the tier, which needs most of a core, suffers more.
    """
    spec = PageSpec(args.bytes // page, 1, page)
    disk = DiskTier(spec, folder, make_engine(args.engine, args.depth), merge_bytes=page)
    rng = np.random.default_rng(0)
    found: dict[str, float] = {}
    ranges: dict[str, tuple[float, float]] = {}
    try:
        every, memory = np.arange(spec.num_blocks), rng.integers(0, 256, (SMALL, page), dtype=np.uint8)
        for first in range(0, spec.num_blocks, SMALL):
            some = every[first : first + SMALL]
            disk.write(some, memory, np.arange(len(some)))
        found["small_read_mb_s"] = tier(disk, args, False, rng, SMALL)
        for name, write in (("read", False), ("write", True)):  # fio's writes are in nobody's checksums
            ours: list[float] = []
            theirs: list[float] = []
            for turn in range(args.rounds):
                for own in (turn % 2 == 1, turn % 2 == 0):  # neither always follows the other
                    if own:
                        ours.append(tier(disk, args, write, rng))
                    else:
                        theirs.append(fio(disk, args, page, write))
            found[f"{name}_mb_s"], found[f"fio_{name}_mb_s"] = statistics.median(ours), statistics.median(theirs)
            found[f"{name}_ratio"] = found[f"{name}_mb_s"] / found[f"fio_{name}_mb_s"]
            ranges |= {f"{name}_range": (min(ours), max(ours)), f"fio_{name}_range": (min(theirs), max(theirs))}
        disk.merge_bytes = MERGE_BYTES
        found["merged_write_mb_s"] = tier(disk, args, True, rng)
        return {"page_bytes": page, "engine": disk.engine.name, "direct": disk.direct, **found, **ranges}
    finally:
        disk.close()


def run(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="ktx-disk-", dir=args.folder) as folder:
        results = [compare(Path(folder), args, kib << 10) for kib in args.pages]
    return {
        "benchmark": "disk", **environment(), "file_gib": args.gib, "depth": args.depth,
        "rounds": args.rounds, "seconds": args.seconds, "results": results,
    }  # fmt: skip


def report(document: dict[str, Any]) -> None:
    print(f"disk tier against fio; {document['hardware']}; file {document['file_gib']} GiB, depth {document['depth']}")
    print(
        f"{'page':>9} {'read MB/s':>10} {'fio':>8} {'ratio':>6} {'by 64':>6} "
        f"{'write MB/s':>11} {'fio':>8} {'ratio':>6} {'merged':>7}"
    )
    for row in document["results"]:
        print(
            f"{row['page_bytes'] >> 10:>5} KiB {row['read_mb_s']:>10.0f} {row['fio_read_mb_s']:>8.0f} "
            f"{row['read_ratio']:>6.2f} {row['small_read_mb_s']:>6.0f} "
            f"{row['write_mb_s']:>11.0f} {row['fio_write_mb_s']:>8.0f} "
            f"{row['write_ratio']:>6.2f} {row['merged_write_mb_s']:>7.0f}"
        )
    print(f"engine {document['results'][0]['engine']}, O_DIRECT {document['results'][0]['direct']}; target {TARGET}")


def main(argv: list[str] | None = None) -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--folder", type=Path, help="where the files go: a folder on the disk in question")
    options.add_argument("--gib", type=float, default=1.0, help="size of each file")
    options.add_argument("--page-kib", default="16,64", help="page sizes, multiples of 4")
    options.add_argument("--depth", type=int, default=64, help="transfers in flight, both sides")
    options.add_argument("--seconds", type=float, default=2.0, help="length of each measurement")
    options.add_argument("--warm-up", type=float, default=1.0, help="seconds before each, both sides: uses up bursts")
    options.add_argument("--rounds", type=int, default=3, help="measurements of each side, in turns")
    options.add_argument("--engine", default="auto", choices=ENGINES)
    options.add_argument("--json", action="store_true", help="the last line of stdout is one JSON object")
    options.add_argument("--save", metavar="NAME", help=f"also write {RESULTS.name}/NAME.json")
    args = options.parse_args(argv)
    args.pages, args.bytes = [int(part) for part in args.page_kib.split(",")], int(args.gib * 2**30)
    if shutil.which("fio") is None:
        options.error("fio isn't installed, and it is what the tier is measured against: apt-get install fio")
    if any(page % 4 or page < 4 for page in args.pages):
        options.error(f"--page-kib {args.page_kib}: use multiples of 4")
    document = run(args)
    report(document)
    save(document, args)


if __name__ == "__main__":
    sys.exit(main())
