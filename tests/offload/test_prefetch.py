"""The layer pipeline: asks for the right pages in the right order, and takes back what a new batch doesn't want."""

import numpy as np
import pytest

from vllm_ktx.offload import LayerPipeline
from vllm_ktx.offload.transfers import Fetch


class Recorder:
    """Stands for a pool."""

    wave = 3

    def __init__(self) -> None:
        self.asked: list[tuple[int, list[int]]] = []
        self.cancelled: list[int] = []

    def has(self, layer, blocks):
        return False

    def prefetch(self, layer, blocks, parts):
        self.asked.append((layer, blocks.tolist()))
        return [Fetch(layer, blocks, blocks, parts)]

    def cancel(self, fetches):
        self.cancelled += [fetch.layer for fetch in fetches]


def step(pipeline: LayerPipeline, layers: int = 4, batch: object = "a") -> None:
    pipeline.begin_step(batch)
    for layer in range(layers):
        pipeline.before_layer(layer)
        pipeline.chosen(layer, [layer, layer + 10])


def test_the_last_choice_is_asked_for_ahead_and_once() -> None:
    pool = Recorder()
    pipeline = LayerPipeline(pool, 4, ahead=2)
    step(pipeline)
    assert pool.asked == [(0, [0, 10]), (1, [1, 11])], "behind the last layer comes the next step's first"
    pool.asked.clear()
    step(pipeline)
    assert [layer for layer, _ in pool.asked] == [2, 3, 0, 1]
    assert all(blocks == [layer, layer + 10] for layer, blocks in pool.asked)


def test_a_new_batch_takes_back_the_forecasts() -> None:
    pool = Recorder()
    pipeline = LayerPipeline(pool, 4, ahead=2)
    step(pipeline)
    pool.asked.clear()
    step(pipeline, batch="b")
    assert sorted(pool.cancelled) == [0, 1]
    assert [layer for layer, _ in pool.asked] == [0, 1], "nothing was known of the new batch before its layers ran"


def test_a_choice_is_cut_to_a_wave_and_copied() -> None:
    pool = Recorder()
    pipeline = LayerPipeline(pool, 2, ahead=1)
    blocks = np.arange(9)
    pipeline.begin_step(0)
    pipeline.chosen(1, blocks)
    blocks[:] = 0
    pipeline.before_layer(0)
    assert pool.asked == [(1, [0, 1, 2])]


def test_none_ahead_asks_for_nothing() -> None:
    pool = Recorder()
    pipeline = LayerPipeline(pool, 4, ahead=0)
    step(pipeline)
    step(pipeline)
    assert not pool.asked


def test_a_pipeline_longer_than_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match="4 layers ahead of 4"):
        LayerPipeline(Recorder(), 4, ahead=4)


def test_what_is_all_there_is_not_asked_for():
    pool = Recorder()
    pool.has = lambda layer, blocks: True
    pipeline = LayerPipeline(pool, 2, ahead=1)
    pipeline.begin_step(b"a")
    pipeline.chosen(1, [3, 4])
    pipeline.before_layer(0)
    assert not pool.asked
