"""Every policy through the same matrix: what it returns is allowed, distinct and enough; then what each is for."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ktx.offload.eviction import POLICIES, make_policy


@pytest.fixture(params=POLICIES)
def name(request) -> str:
    return request.param


@settings(max_examples=60, deadline=None)
@given(data=st.data(), which=st.sampled_from(sorted(POLICIES)), size=st.integers(1, 70))
def test_victims_are_allowed_distinct_and_enough(data, which, size) -> None:
    policy = make_policy(which, size)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    for _ in range(data.draw(st.integers(1, 30))):
        slots = rng.permutation(size)[: rng.integers(0, size + 1)]
        match rng.integers(4):
            case 0:
                policy.admit(slots)
            case 1:
                policy.use(slots)
            case 2:
                policy.weigh(slots, rng.random(len(slots), dtype=np.float32))
            case 3:
                allowed = rng.random(size) < rng.random()
                count = int(rng.integers(0, size + 2))
                victims = policy.victims(count, allowed)
                assert len(victims) == len(set(victims.tolist())) == min(count, allowed.sum())
                assert allowed[victims].all()


def test_pages_in_use_survive_pages_that_are_not(name) -> None:
    policy = make_policy(name, 32)
    every, hot = np.arange(32), np.arange(8, 16)
    policy.admit(every)
    for _ in range(20):
        policy.use(hot)
        policy.weigh(every, np.where(np.isin(every, hot), 0.1, 0.001).astype(np.float32))
    first = policy.victims(12, np.ones(32, bool))
    assert not np.isin(first, hot).any()


def test_a_new_page_is_not_the_next_victim_of_a_warm_pool(name) -> None:
    policy = make_policy(name, 16)
    every = np.arange(16)
    policy.admit(every)
    for _ in range(5):
        policy.use(every[:8])
        policy.weigh(every, np.where(every < 8, 0.1, 0.001).astype(np.float32))
    victim = policy.victims(1, np.ones(16, bool))
    policy.admit(victim)
    assert policy.victims(1, np.ones(16, bool)) != victim


def test_no_victims_where_nothing_is_allowed(name) -> None:
    policy = make_policy(name, 8)
    policy.admit(np.arange(8))
    assert not len(policy.victims(3, np.zeros(8, bool)))


def test_lru_takes_the_longest_unused() -> None:
    policy = make_policy("lru", 4)
    for slot in (2, 0, 3, 1, 2):
        policy.use(np.array([slot]))
    assert policy.victims(4, np.ones(4, bool)).tolist() == [0, 3, 1, 2]


def test_clock_resists_a_scan() -> None:
    """Pages that are read once pass through; pages that are read again and again stay."""
    policy = make_policy("clock", 16)
    policy.admit(np.arange(16))
    for _ in range(50):
        policy.use(np.arange(8))
        victims = policy.victims(4, np.ones(16, bool))
        assert (victims >= 8).all()
        policy.admit(victims)


def test_attention_forgets_old_mass() -> None:
    policy = make_policy("attention", 2)
    policy.admit(np.arange(2))
    for _ in range(10):
        policy.weigh(np.arange(2), np.array([1.0, 0.01], np.float32))
    assert policy.victims(1, np.ones(2, bool)).tolist() == [1]
    for _ in range(60):
        policy.weigh(np.arange(2), np.array([0.01, 0.1], np.float32))
    assert policy.victims(1, np.ones(2, bool)).tolist() == [0]


def test_attention_survives_very_many_steps() -> None:
    policy = make_policy("attention", 4)
    policy.admit(np.arange(4))
    for _ in range(5000):
        policy.weigh(np.arange(4), np.array([0.1, 0.2, 0.3, 0.4], np.float32))
    assert policy.victims(4, np.ones(4, bool)).tolist() == [0, 1, 2, 3]


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(ValueError, match="lru, clock, attention; did you mean 'clock'"):
        make_policy("clok", 4)
