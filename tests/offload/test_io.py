"""Both engines: what they move arrives, what fails says so, batches larger than their depth wait their turn."""

import errno
import mmap
import os
import threading
import time

import numpy as np
import pytest

from vllm_ktx.offload.io import READ, WRITE, make_engine


@pytest.fixture(params=["io_uring", "threads"])
def engine(request):
    try:
        made = make_engine(request.param, depth=8)
    except OSError as error:
        pytest.skip(f"io_uring isn't allowed here: {error}")
    yield made
    made.close()


@pytest.fixture
def file(tmp_path):
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 1 << 20)
    yield fd
    os.close(fd)


def buffer(size: int) -> tuple[np.ndarray, int]:
    data = np.frombuffer(mmap.mmap(-1, size), np.uint8)
    return data, data.ctypes.data


def test_what_was_written_is_read(engine, file) -> None:
    data, address = buffer(1 << 20)
    data[:] = np.random.default_rng(0).integers(0, 256, 1 << 20)
    at = np.arange(0, 1 << 20, 4096)
    lengths = np.full(len(at), 4096)
    assert (engine.wait(engine.submit(WRITE, file, at, address + at, lengths), 10) == 4096).all()
    back, to = buffer(1 << 20)
    order = np.random.default_rng(1).permutation(len(at))
    ticket = engine.submit(READ, file, at[order], to + at[order], lengths)
    assert (engine.wait(ticket, 10) == 4096).all() and ticket.done and engine.poll(ticket)
    assert (back == data).all()


def test_each_transfer_has_its_own_result(engine, file) -> None:
    data, address = buffer(16384)
    offsets, lengths = np.array([0, (1 << 20) - 1000, 1 << 20, 8192]), np.full(4, 4096)
    moved = engine.wait(engine.submit(READ, file, offsets, address + 4096 * np.arange(4), lengths), 10)
    assert moved.tolist() == [4096, 1000, 0, 4096]
    bad = engine.wait(engine.submit(READ, file, np.zeros(2, int), np.array([address, 8]), lengths[:2]), 10)
    assert bad.tolist() == [4096, -errno.EFAULT]
    assert (
        engine.wait(engine.submit(READ, 9999, np.zeros(1, int), np.array([address]), lengths[:1]), 10)[0]
        == -errno.EBADF
    )


def test_an_empty_batch_is_done(engine, file) -> None:
    none = np.zeros(0, np.int64)
    ticket = engine.submit(READ, file, none, none, none)
    assert ticket.done and not len(engine.wait(ticket, 0))


def test_a_transfer_that_does_not_finish_ends_the_wait_not_the_engine(engine) -> None:
    """A pipe that nobody fills stands for a disk that hangs."""
    if engine.name == "threads":
        pytest.skip("pread doesn't read pipes")
    _, address = buffer(4096)
    anywhere = np.array([-1])
    pipes = [os.pipe(), os.pipe()]
    ticket = engine.submit(READ, pipes[0][0], anywhere, np.array([address]), np.array([4096]))
    assert not engine.poll(ticket)
    with pytest.raises(TimeoutError):
        engine.wait(ticket, 0.05)
    many = (np.repeat(anywhere, 20), np.full(20, address), np.full(20, 100))
    late = engine.submit(READ, pipes[1][0], *many, timeout=0.05)
    os.write(pipes[0][1], b"x" * 4096)
    assert engine.wait(ticket, 10)[0] == 4096
    os.write(pipes[1][1], b"y" * 700)
    results = engine.wait(late, 10)
    assert results.tolist() == [100] * 7 + [-errno.ETIMEDOUT] * 13, "those without room were given up"
    for fd in (*pipes[0], *pipes[1]):
        os.close(fd)


def test_threads_share_an_engine(engine, file) -> None:
    problems = []

    def work(seed: int) -> None:
        data, address = buffer(65536)
        at = np.arange(0, 65536, 4096)
        for i in range(30):
            data[:] = (seed * 50 + i) % 251
            done = engine.submit(WRITE, file, seed * 65536 + at, address + at, np.full(16, 4096))
            if (engine.wait(done, 10) != 4096).any():
                problems.append("write")
            data[:] = 255
            engine.wait(engine.submit(READ, file, seed * 65536 + at, address + at, np.full(16, 4096)), 10)
            if (data != (seed * 50 + i) % 251).any():
                problems.append("read")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a thread hangs"
    assert not problems


def test_a_thread_takes_nothing_that_another_is_about_to_sleep_for(engine, file, monkeypatch) -> None:
    if engine.name == "threads":
        pytest.skip("only a ring has completions to take")
    _, address = buffer(4096)
    ticket = engine.submit(READ, file, np.array([0]), np.array([address]), np.array([4096]))
    sleep = engine._sleep

    def meddle(timeout: float, count: int) -> None:
        time.sleep(0.05)  # the transfer is done by now, and the lock is free
        other = threading.Thread(target=engine.poll, args=(ticket,))
        other.start()
        other.join()
        sleep(timeout, count)

    monkeypatch.setattr(engine, "_sleep", meddle)
    monkeypatch.setattr(type(engine), "_reap", _skip_first(type(engine)._reap))
    start = time.monotonic()
    assert engine.wait(ticket, 5)[0] == 4096
    assert time.monotonic() - start < 2


def _skip_first(reap):
    calls = []

    def late(self) -> None:  # the first look, before the wait, finds nothing
        calls.append(self)
        if len(calls) > 1:
            reap(self)

    return late


def test_one_transfer_that_hangs_does_not_hold_up_the_others(engine, file) -> None:
    if engine.name == "threads":
        pytest.skip("pread doesn't read pipes")
    _, address = buffer(4096)
    pipe = os.pipe()
    hanging = engine.submit(READ, pipe[0], np.full(4, -1), np.full(4, address), np.full(4, 100))
    waiter = threading.Thread(target=engine.wait, args=(hanging, 30))
    waiter.start()
    start = time.monotonic()
    for _ in range(20):
        engine.wait(engine.submit(READ, file, np.array([0]), np.array([address]), np.array([4096])), 10)
    assert time.monotonic() - start < 5
    os.write(pipe[1], b"x" * 400)
    waiter.join(30)
    assert hanging.done
    for fd in pipe:
        os.close(fd)


def test_an_unknown_engine_is_named() -> None:
    with pytest.raises(ValueError, match="auto, io_uring, threads"):
        make_engine("aio")


def test_auto_falls_back_to_threads(monkeypatch) -> None:
    from vllm_ktx.offload import io_uring

    def forbidden(self, depth):
        raise OSError(errno.EPERM, "forbidden")

    monkeypatch.setattr(io_uring.UringEngine, "__init__", forbidden)
    engine = make_engine("auto")
    assert engine.name == "threads"
    engine.close()
    with pytest.raises(OSError, match="forbidden"):
        make_engine("io_uring")
