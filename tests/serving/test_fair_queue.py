"""Shares of clients, and of the HTTP requests of a client."""

import collections
import heapq
import itertools

import pytest

from dflash.serving.fair_queue import FairQueue


def test_requests_of_one_owner_keep_their_order():
    queue = FairQueue(2)
    for id in range(5):
        queue.add(id, ("a", "a1"))
    assert list(queue.take()) == [0, 1]
    assert queue.waiting == 3
    assert queue.remove(0)
    assert list(queue.take()) == [2]


def test_a_newcomer_gets_the_next_place():
    queue = FairQueue(2, clock=lambda: 0.0)
    for id in range(100):
        queue.add(id, ("a", "a1" if id < 50 else "a2"))
    assert list(queue.take()) == [0, 50], "the requests of a client share its places"
    queue.add(100, ("b", "b1"))
    queue.add(101, ("a", "a3"))
    queue.remove(0)
    assert list(queue.take()) == [100], "clients come before requests"
    queue.remove(50)
    assert list(queue.take()) == [1]
    queue.remove(100)
    assert list(queue.take()) == [51]


@pytest.mark.parametrize("level", ["clients", "requests"])
def test_a_newcomer_passes_older_requests_that_had_a_place(level):
    """Eight owners of 16 outputs each, and only four places, of which they have one at most."""
    ends = 0
    queue = FairQueue(4, clock=lambda: ends)
    of = (lambda name: (name, name)) if level == "clients" else (lambda name: ("a", name))
    for id in range(128):
        queue.add(id, of(f"large{id // 16}"))
    running = list(queue.take())
    assert running == [0, 16, 32, 48]
    queue.add(200, of("small"))
    while 200 not in running:
        ends += 1
        queue.remove(running.pop(0))
        running += queue.take()
    assert ends == 5, "it waits for one place of each that came before it and had none"


def test_requests_share_the_time_of_places():
    """Ten requests of many long outputs leave eight clients of short ones eight shares of 18."""
    now, seconds, ids = 0.0, {"long": 64.0, "short": 10.0}, itertools.count()
    queue, ends, used = FairQueue(4, clock=lambda: now), [], collections.Counter()
    kinds = {}

    def add(kind, name):
        kinds[id := next(ids)] = kind, name
        queue.add(id, ("client", name))

    for name in range(10):
        add("long", name)
        add("long", name)
    for number in range(8):
        add("short", f"{number}:0")
    while now < 4000:
        for id in queue.take():
            heapq.heappush(ends, (now + seconds[kinds[id][0]], id))
        now, id = heapq.heappop(ends)
        kind, name = kinds[id]
        queue.remove(id)
        used[kind] += seconds[kind]
        add(kind, name if kind == "long" else f"{name}'")  # The client's next request.
    assert used["short"] / used.total() == pytest.approx(8 / 18, abs=0.1)


def test_requests_that_end_while_they_wait():
    queue = FairQueue(1)
    queue.add(0, ("a",))
    queue.add(1, ("a",))
    assert list(queue.take()) == [0]
    assert not queue.remove(1)
    assert not queue.remove(7)
    assert queue.remove(0)
    assert list(queue.take()) == []


def test_priorities_go_before_fairness():
    queue = FairQueue(1)
    queue.add(0, ("a",))
    queue.add(1, ("b",), 5)
    queue.add(2, ("a",), -1)
    queue.add(3, ("a",), 5)
    order = []
    for _ in range(4):
        (id,) = queue.take()
        order.append(id)
        queue.remove(id)
    assert order == [2, 0, 1, 3]
