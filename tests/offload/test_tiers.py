"""Every store gives back what was written, part by part, from any thread, and says so when it can't."""

import os
import threading
import time

import numpy as np
import pytest

from tests.offload.cases import KINDS, SPLIT, WHOLE_PAGES, content, make_store
from vllm_ktx.offload import REST, SCORING, CapacityError, DiskTier, PageMissing, PageSpec, TieredStore, TierFault


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.mark.parametrize("spec", [SPLIT, WHOLE_PAGES], ids=["split", "whole"])
def test_pages_come_back_in_any_order_and_part(kind, spec, tmp_path) -> None:
    store = make_store(kind, spec, tmp_path)
    rng = np.random.default_rng(0)
    every = rng.permutation(spec.num_pages)
    source = np.zeros((spec.num_pages + 7, spec.page_bytes + 64), np.uint8)  # strided rows, scattered
    rows = rng.permutation(spec.num_pages + 7)[: spec.num_pages]
    source[rows, : spec.page_bytes] = content(spec, every)
    store.write(every, source, rows)
    cut = spec.scoring_bytes or spec.page_bytes
    for parts, low, high in ((SCORING, 0, cut), (REST, cut, spec.page_bytes), (SCORING | REST, 0, spec.page_bytes)):
        low = low if spec.scoring_bytes else 0
        for count in (0, 1, 50, spec.num_pages):
            pages, to = rng.permutation(every)[:count], rng.permutation(spec.num_pages + 7)[:count]
            out = np.full_like(source, 7)
            store.read(pages, out, to, parts)
            assert (out[to, low:high] == content(spec, pages)[:, low:high]).all()
            out[to, low:high] = 7
            assert (out == 7).all(), "bytes beside the pages were touched"
    store.close()


def test_page_named_twice_in_a_read(kind, tmp_path) -> None:
    store = make_store(kind, SPLIT, tmp_path)
    pages = np.array([5, 5, 6, 5, 70])
    store.write(np.unique(pages), content(SPLIT, np.unique(pages)), np.arange(3))
    out = np.zeros((5, SPLIT.page_bytes), np.uint8)
    store.read(pages, out, np.arange(5))
    assert (out == content(SPLIT, pages)).all()
    store.close()


def test_the_last_write_wins(kind, tmp_path) -> None:
    store = make_store(kind, SPLIT, tmp_path)
    rng, latest = np.random.default_rng(1), {}
    for version in range(60):
        pages = rng.choice(SPLIT.num_pages, rng.integers(1, 30), replace=False)
        store.write(pages, content(SPLIT, pages, version), np.arange(len(pages)))
        latest |= dict.fromkeys(pages.tolist(), version)
        asked = rng.choice(list(latest), min(20, len(latest)), replace=False)
        out = np.zeros((len(asked), SPLIT.page_bytes), np.uint8)
        store.read(asked, out, np.arange(len(asked)))
        for row, page in zip(out, asked.tolist(), strict=True):
            assert (row == content(SPLIT, [page], latest[page])).all()
        if isinstance(store, TieredStore):
            store.check_integrity()
    store.close()


def test_a_page_that_was_never_written_is_an_error_and_the_others_come(kind, tmp_path) -> None:
    store = make_store(kind, SPLIT, tmp_path)
    pages = np.array([3, 100, 4])
    store.write(pages[[0, 2]], content(SPLIT, pages[[0, 2]]), np.arange(2))
    out = np.zeros((3, SPLIT.page_bytes), np.uint8)
    with pytest.raises(TierFault, match="block 20, layer 2.*never written") as caught:
        store.read(pages, out, np.arange(3))
    assert list(caught.value.faults) == [1]
    assert isinstance(caught.value.faults[1], PageMissing)
    assert (out[[0, 2]] == content(SPLIT, pages[[0, 2]])).all()
    store.close()


def test_readers_and_writers_side_by_side(kind, tmp_path) -> None:
    """Each thread has pages of its own; frames, staging, the ring and the file are shared."""
    store = make_store(kind, SPLIT, tmp_path)
    problems: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            rng, mine = np.random.default_rng(seed), np.arange(seed, SPLIT.num_pages, 4)
            versions = np.zeros(SPLIT.num_pages, int)
            store.write(mine, content(SPLIT, mine), np.arange(len(mine)))
            for version in range(1, 15):
                new = rng.choice(mine, 10, replace=False)
                store.write(new, content(SPLIT, new, version), np.arange(10))
                versions[new] = version
                asked = rng.choice(mine, 15, replace=False)
                out = np.zeros((15, SPLIT.page_bytes), np.uint8)
                store.read(asked, out, np.arange(15))
                for row, page in zip(out, asked.tolist(), strict=True):
                    assert (row == content(SPLIT, [page], int(versions[page]))).all(), f"page {page}"
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a thread hangs"
    assert not problems, problems[0]
    if isinstance(store, TieredStore):
        store.check_integrity()
    elif isinstance(store, DiskTier):
        store.staging.check_integrity()
    store.close()


def test_disk_file_is_private_and_has_no_name(tmp_path) -> None:
    tier = DiskTier(SPLIT, tmp_path)
    status = os.fstat(tier.fd)
    assert status.st_mode & 0o777 == 0o600
    assert status.st_nlink == 0 and not list(tmp_path.iterdir())
    assert status.st_blocks * 512 >= status.st_size == DiskTier.file_bytes(SPLIT), "its space isn't all taken"
    tier.close()


def test_neighbouring_pages_are_one_transfer(tmp_path) -> None:
    from tests.offload.faulty import FaultyEngine
    from vllm_ktx.offload.io import make_engine

    spec = PageSpec(400, 1, 8192, 4096)
    engine = FaultyEngine(make_engine())
    tier = DiskTier(spec, tmp_path, engine)
    pages = np.arange(256)
    tier.write(pages, content(spec, pages), pages)
    assert [length for _, _, length in engine.submitted] == [1 << 20, 1 << 20]
    engine.submitted.clear()
    out = np.zeros((8, 8192), np.uint8)
    tier.read(np.array([1, 2, 3, 9, 10, 20, 22, 4]), out, np.arange(8))
    assert [length // 8192 for _, _, length in engine.submitted] == [4, 2, 1, 1]
    engine.submitted.clear()
    tier.read(np.array([1, 2, 3]), out, np.arange(3), SCORING)
    assert [length for _, _, length in engine.submitted] == [2 * 8192 + 4096], "reads through small gaps"
    tier.close()


def test_a_scoring_read_of_a_large_page_moves_no_other_bytes(tmp_path) -> None:
    from tests.offload.faulty import FaultyEngine
    from vllm_ktx.offload.io import make_engine

    spec = PageSpec(8, 1, 73728, 18944)
    engine = FaultyEngine(make_engine())
    tier = DiskTier(spec, tmp_path, engine)
    pages = np.arange(8)
    tier.write(pages, content(spec, pages), pages)
    engine.submitted.clear()
    tier.read(pages, np.zeros((8, 73728), np.uint8), pages, SCORING)
    assert [length for _, _, length in engine.submitted] == [20480] * 8
    tier.close()


def test_store_refuses_to_be_too_small(tmp_path) -> None:
    half = PageSpec(20, 3, 9000, 2500)
    disk = DiskTier(half, tmp_path)
    with pytest.raises(CapacityError, match=r"ktx.host_gib.*ktx.disk_gib"):
        TieredStore(SPLIT, half.total_bytes - 1, disk)
    disk.close()


def test_a_read_that_a_write_overtakes_is_not_kept(tmp_path) -> None:
    from tests.offload.faulty import FaultyTier

    disk = FaultyTier(DiskTier(SPLIT, tmp_path))
    store = TieredStore(SPLIT, 8 * SPLIT.page_bytes, disk)
    page, others, one = np.array([3]), np.arange(20, 60), np.zeros(1, int)
    store.write(page, content(SPLIT, page, 1), one)
    store.write(others, content(SPLIT, others), np.arange(40))  # pushes the page out to disk
    disk.gate.clear()
    reader = threading.Thread(target=store.read, args=(page, np.zeros((1, SPLIT.page_bytes), np.uint8), one))
    reader.start()
    end = time.monotonic() + 20
    while not disk.waiting and time.monotonic() < end:
        time.sleep(0.001)
    # The disk has handed out the old page, which is on its way; new content comes, and goes to disk too.
    store.write(page, content(SPLIT, page, 2), one)
    store.write(others, content(SPLIT, others), np.arange(40))
    store.write(np.array([70]), content(SPLIT, [70]), one)  # leaves clean frames
    disk.gate.set()
    reader.join(20)
    out = np.zeros((1, SPLIT.page_bytes), np.uint8)
    store.read(page, out, one)
    assert (out == content(SPLIT, page, 2)).all()
    store.close()


def test_a_working_set_that_fits_host_memory_never_touches_the_disk(tmp_path) -> None:
    from tests.offload.faulty import FaultyTier

    disk = FaultyTier(DiskTier(SPLIT, tmp_path))
    store = TieredStore(SPLIT, 30 * SPLIT.page_bytes, disk)
    disk.bad_writes = set(range(SPLIT.num_pages))
    pages, out = np.arange(40, 70), np.zeros((30, SPLIT.page_bytes), np.uint8)
    for version in range(5):
        store.write(pages, content(SPLIT, pages, version), np.arange(30))
        store.read(pages, out, np.arange(30))
    assert (out == content(SPLIT, pages, 4)).all() and not disk.reads
    disk.bad_writes = set()
    store.write(np.arange(10), content(SPLIT, np.arange(10)), np.arange(10))  # takes frames: old pages go to disk
    store.read(pages, out, np.arange(30))
    assert (out == content(SPLIT, pages, 4)).all()
    promoted, disk.reads = disk.reads, []
    assert sum(len(reads) for reads in promoted) == 10
    store.read(np.array(promoted[0]), out, np.arange(len(promoted[0])))
    assert not disk.reads, "pages that were read are promoted"
    store.close()
