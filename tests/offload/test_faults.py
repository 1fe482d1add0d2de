"""Disks that fill up, hang, lie or fail; processes that are killed: never silent, never endless, one page's fault."""

import errno
import mmap
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.offload.cases import SPLIT, content
from tests.offload.faulty import FaultyEngine
from vllm_ktx.offload import (
    SCORING,
    CapacityError,
    DiskTier,
    HostTier,
    PageCorrupt,
    PageIOError,
    PageMissing,
    PageSpec,
    PageTimeout,
    TierFault,
    private_file,
)
from vllm_ktx.offload.io import make_engine

PAGES = np.arange(20)


@pytest.fixture
def tier(tmp_path):
    made = DiskTier(SPLIT, tmp_path, FaultyEngine(make_engine()), timeout=0.2)
    made.write(PAGES, content(SPLIT, PAGES), PAGES)
    yield made
    made.engine.hang.clear()
    made.staging.check_integrity()
    made.close()


def read(tier: DiskTier, parts: int = 3) -> tuple[np.ndarray, dict]:
    out = np.zeros((20, SPLIT.page_bytes), np.uint8)
    try:
        tier.read(PAGES, out, PAGES, parts)
    except TierFault as fault:
        return out, fault.faults
    return out, {}


def flip_bit(tier: DiskTier, page: int, byte: int) -> None:
    """In the file, behind the tier's back."""
    with mmap.mmap(-1, 4096) as block:
        offset = (page * tier.stride + byte) // 4096 * 4096
        os.preadv(tier.fd, [block], offset)
        block[byte % 4096] ^= 4
        os.pwritev(tier.fd, [block], offset)


@pytest.mark.parametrize("byte", [0, 2499, 2500, 8999])
def test_a_flipped_bit_is_found(tier, byte) -> None:
    flip_bit(tier, 7, byte)
    out, faults = read(tier)
    assert list(faults) == [7] and isinstance(faults[7], PageCorrupt)
    assert "block 7, layer 0" in str(faults[7])
    others = PAGES != 7
    assert (out[others] == content(SPLIT, PAGES)[others]).all() and not out[7].any()
    assert bool(read(tier, SCORING)[1]) == (byte < 2500), "a part is judged by its own bytes"
    tier.write(PAGES[7:8], content(SPLIT, PAGES[7:8], 1), np.zeros(1, int))
    assert not read(tier)[1], "new content heals the page"


def test_a_page_at_the_wrong_place_is_found(tier) -> None:
    with mmap.mmap(-1, tier.stride) as block:
        os.preadv(tier.fd, [block], 3 * tier.stride)
        os.pwritev(tier.fd, [block], 4 * tier.stride)
    assert [type(why) for why in read(tier)[1].values()] == [PageCorrupt]


@pytest.mark.parametrize("kind, text", [("eio", "Input/output error"), ("short", "short read: .* of 12288 bytes")])
def test_one_bad_sector_costs_one_page(tier, kind, text) -> None:
    tier.engine.bad_bytes[9 * tier.stride + 100] = kind
    out, faults = read(tier)
    assert list(faults) == [9] and isinstance(faults[9], PageIOError)
    with pytest.raises(TierFault, match=text):
        raise TierFault(faults)
    others = PAGES != 9
    assert (out[others] == content(SPLIT, PAGES)[others]).all()


def test_a_passing_fault_is_retried(tier) -> None:
    tier.engine.bad_bytes[9 * tier.stride] = "once"
    out, faults = read(tier)
    assert not faults and tier.retries == 20, "the whole merged transfer, page by page"
    assert (out == content(SPLIT, PAGES)).all()


@pytest.mark.parametrize("kind", ["eio", "short"])
def test_a_failed_write_can_not_be_read(tier, kind) -> None:
    tier.engine.bad_bytes[5 * tier.stride + 8192] = kind
    with pytest.raises(TierFault, match="block 5, layer 0: (short write|disk write failed)") as caught:
        tier.write(PAGES, content(SPLIT, PAGES, 1), PAGES)
    assert list(caught.value.faults) == [5]
    tier.engine.bad_bytes.clear()
    out, faults = read(tier)
    assert list(faults) == [5] and isinstance(faults[5], PageMissing)
    assert (out[PAGES != 5] == content(SPLIT, PAGES, 1)[PAGES != 5]).all()


def test_a_disk_that_hangs_is_given_up_and_used_again(tier) -> None:
    tier.engine.hang.set()
    start = time.monotonic()
    for _ in range(8):  # more than there are staging buffers
        faults = read(tier)[1]
        assert len(faults) == 20 and all(isinstance(why, PageTimeout) for why in faults.values())
    assert time.monotonic() - start < 10
    tier.engine.hang.clear()
    out, faults = read(tier)
    assert not faults and (out == content(SPLIT, PAGES)).all()


def test_a_full_disk_is_found_at_start(tmp_path) -> None:
    with pytest.raises(
        CapacityError, match=r"GiB free\): lower ktx.disk_gib, free space, or name another ktx.disk_dir"
    ):
        private_file.open_private(tmp_path, 1 << 50)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up_meanwhile_is_found_at_start(tmp_path, monkeypatch) -> None:
    def full(fd, mode, offset, size):
        private_file.ctypes.set_errno(errno.ENOSPC)
        return -1

    monkeypatch.setattr(private_file, "_fallocate", full)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CapacityError, match="No space left on device"):
        DiskTier(SPLIT, tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_folder_that_is_not_there_is_named(tmp_path) -> None:
    with pytest.raises(CapacityError, match="ktx.disk_dir='.*nowhere'"):
        DiskTier(SPLIT, tmp_path / "nowhere")


def test_memory_that_is_not_there_is_named() -> None:
    with pytest.raises(CapacityError, match="lower ktx.host_gib"):
        HostTier(PageSpec(1 << 10, 1 << 10, 1 << 40))


def test_filesystem_without_unnamed_files_or_direct_transfers(tmp_path, monkeypatch, caplog) -> None:
    real_open, real_read = os.open, os.preadv

    def no_tmpfile(path, flags, mode=0o777, **other):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        return real_open(path, flags, mode, **other)

    def no_direct(fd, buffers, offset):
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "open", no_tmpfile)
    monkeypatch.setattr(os, "preadv", no_direct)
    tier = DiskTier(SPLIT, tmp_path)
    monkeypatch.setattr(os, "preadv", real_read)
    assert not tier.direct and not list(tmp_path.iterdir()) and os.fstat(tier.fd).st_mode & 0o777 == 0o600
    assert "refuses O_DIRECT" in caplog.text
    tier.write(PAGES, content(SPLIT, PAGES), PAGES)
    assert (read(tier)[0] == content(SPLIT, PAGES)).all()
    tier.close()


CHILD = """
import sys, time, numpy as np
from pathlib import Path
from vllm_ktx.offload import DiskTier, PageSpec
spec = PageSpec(1000, 4, 65536)
tier = DiskTier(spec, Path(sys.argv[1]))
pages, data = np.arange(64), np.ones((64, 65536), np.uint8)
print("ready", flush=True)
end = time.monotonic() + 60  # should whoever was to end it be gone
while time.monotonic() < end:
    tier.write(pages, data, pages)
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_process_leaves_nothing(tmp_path, end) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        held = [os.stat(f"/proc/{child.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{child.pid}/fd")]
        assert any(status.st_blocks * 512 >= 4000 * 65536 for status in held), "the file is there, without a name"
        assert not list(tmp_path.iterdir())
        child.send_signal(end)
        assert child.wait(30) == -end
        assert not list(tmp_path.iterdir())
    finally:
        child.kill()
        child.communicate()
