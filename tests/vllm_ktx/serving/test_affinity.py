"""Where requests go: heads, sessions, load, room."""

import json
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ktx.serving.affinity import Ask, Candidate, Load, Policy, read_ask

NAMES = [f"replica{i}" for i in range(4)]
IDLE = [Candidate(name) for name in NAMES]


def keys(count: int) -> list[Ask]:
    return [Ask(f"prompt {i}".encode()) for i in range(count)]


def test_heads_spread_evenly_and_always_the_same_way():
    policy = Policy()
    homes = [policy.rank(ask, IDLE)[0] for ask in keys(4000)]
    assert homes == [policy.home(ask, NAMES) for ask in keys(4000)]
    assert all(900 <= count <= 1100 for count in Counter(homes).values())


def test_a_replica_that_leaves_moves_only_its_own_heads():
    policy = Policy()
    for ask in keys(500):
        before, after = policy.rank(ask, IDLE), policy.rank(ask, IDLE[1:])
        assert after == [name for name in before if name != NAMES[0]]


def test_a_busy_home_spills_to_the_next_in_the_heads_order():
    policy, (ask,) = Policy(slack=4), keys(1)
    order = policy.rank(ask, IDLE)

    def loads(home: float, others: float) -> list[Candidate]:
        return [Candidate(name, home if name == order[0] else others) for name in NAMES]

    assert policy.rank(ask, loads(4, 0)) == order, "within the slack"
    assert policy.rank(ask, loads(5, 0)) == [*order[1:], order[0]]
    assert policy.rank(ask, loads(40, 35)) == order, "within 1.25 of the mean"
    assert policy.rank(ask, loads(60, 35)) == [*order[1:], order[0]]


def test_long_requests_look_for_room():
    policy = Policy(long_tokens=32768)
    long, short = Ask(b"head", 100_000), Ask(b"head", 1000)
    order = policy.rank(long, IDLE)
    full = [Candidate(name, free_tokens=50_000 if name in order[:2] else 500_000) for name in NAMES]
    assert policy.rank(long, full) == [*order[2:], *order[:2]]
    assert policy.rank(short, full) == order
    assert policy.rank(long, [Candidate(name, free_tokens=5) for name in NAMES]) == order, "nobody has room: home"
    assert policy.rank(long, [Candidate(name, free_tokens=None) for name in NAMES]) == order


def test_failed_replicas_come_last():
    policy, (ask,) = Policy(), keys(1)
    order = policy.rank(ask, IDLE)
    assert policy.rank(ask, IDLE, failed=order[:1]) == [*order[1:], order[0]]
    assert policy.rank(ask, []) == []


@settings(max_examples=100)
@given(st.lists(st.integers(0, 20), min_size=50, max_size=300), st.integers(1, 6))
def test_no_replica_gets_more_than_its_bound(heads, count):
    """However few heads there are, requests that never end fill replicas no more than one above the bound."""
    policy, loads = Policy(slack=4), dict.fromkeys([f"r{i}" for i in range(count)], 0.0)
    for head in heads:
        bound = max(4, 1.25 * sum(loads.values()) / count)
        chosen = policy.rank(Ask(str(head).encode()), [Candidate(n, load) for n, load in loads.items()])[0]
        assert loads[chosen] <= bound
        loads[chosen] += 1


def test_load_counts_from_choice_to_completion():
    load = Load(patience=0.05)
    load.begin("1", "a", 2.0)
    load.begin("2", "a", 1.0, dispatched=True)
    assert load.by_replica() == {"a": 3.0}
    load.begin("1", "b", 2.0, dispatched=True)
    load.begin("3", "b", 5.0)
    assert load.by_replica() == {"a": 1.0, "b": 7.0}
    time.sleep(0.06)
    assert load.by_replica() == {"a": 1.0, "b": 2.0}, "chosen, never dispatched: forgotten"
    for request in ("1", "2", "unknown"):
        load.end(request)
    assert load.by_replica() == {}


@pytest.mark.parametrize("bad", [{"long_tokens": 0}, {"balance": 0.5}, {"slack": 0}])
def test_impossible_policies_are_refused(bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))}={next(iter(bad.values()))}"):
        Policy(**bad)


def ask_of(document, path="/v1/completions", headers=None) -> Ask:
    return read_ask(path, headers or {}, json.dumps(document).encode(), "X-Session-Id", 64)


def test_key_is_the_prompts_head():
    one, two = "a" * 64 + "x" * 400, "a" * 64 + "y" * 4000
    assert ask_of({"prompt": one}).key == ask_of({"prompt": two}).key != ask_of({"prompt": "b" + one}).key
    assert ask_of({"prompt": one}).tokens == 116 and ask_of({"prompt": two}).tokens == 1016
    assert ask_of({"prompt": one}).key != ask_of({"prompt": one, "model": "adapter"}).key
    assert ask_of({"prompt": [one, "other"]}).key == ask_of({"prompt": one}).key
    ids = list(range(500))
    assert ask_of({"prompt": ids}).tokens == 500
    assert ask_of({"prompt": ids}).key == ask_of({"prompt": [*ids[:16], 7]}).key == ask_of({"prompt": [ids]}).key


def test_chats_go_by_their_first_messages():
    first = [{"role": "system", "content": "s" * 40}, {"role": "user", "content": [{"type": "text", "text": "u" * 40}]}]
    more = [*first, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "and?"}]
    chat = "/v1/chat/completions"
    assert ask_of({"messages": first}, chat).key == ask_of({"messages": more}, chat).key
    other = [first[0], {"role": "user", "content": "something else"}]
    assert ask_of({"messages": first}, chat).key != ask_of({"messages": other}, chat).key
    assert ask_of({"system": "x", "messages": first}, "/v1/messages").key != ask_of({"messages": first}, chat).key


def test_a_session_wins_over_the_prompt_and_bad_bodies_are_left_to_vllm():
    headers = {"x-session-id": "s1"}
    assert ask_of({"prompt": "a"}, headers=headers).key == ask_of({"prompt": "b"}, headers=headers).key
    for body in (b"{", b"[1]", b'"x"', b'{"prompt": 3}', b"\xff\xfe", b""):
        assert read_ask("/v1/completions", {}, body, "x", 64).tokens < 10
    for depth in (900, 100_000):  # the parser's limit, and ours
        deep = b'{"prompt": ' + b"[" * depth + b"]" * depth + b"}"
        assert read_ask("/v1/completions", {}, deep, "x", 64).tokens <= len(deep) // 4
    assert read_ask("/v1/models", {}, b"", "x", 64) == Ask(b"")
