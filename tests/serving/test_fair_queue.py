"""Shares of clients, and of the HTTP requests of a client."""

import collections
import itertools
import random

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
    queue = FairQueue(2)
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


def test_many_requests_of_a_client_get_the_share_of_one_client():
    queue = FairQueue(4)
    for id in range(40):
        queue.add(id, ("a", f"a{id}"))
    for id in range(40, 80):
        queue.add(id, ("b", "b1"))
    taken = []
    for _ in range(20):
        taken += queue.take()
        queue.remove(taken[-4])
    clients = collections.Counter("a" if id < 40 else "b" for id in taken)
    assert abs(clients["a"] - clients["b"]) <= 2


def test_nobody_waits_forever():
    """A large request ends although others keep arriving."""
    queue, draw = FairQueue(3), random.Random(0)
    large = set(range(30))
    for id in large:
        queue.add(id, ("a", "large"))
    running = []
    for id in itertools.count(100):
        queue.add(id, ("a", f"small{id}"))
        running += queue.take()
        ended = running.pop(draw.randrange(len(running)))
        queue.remove(ended)
        large.discard(ended)
        if not large:
            break
        assert id < 1000


@pytest.mark.parametrize("level", ["clients", "requests"])
def test_a_newcomer_passes_older_requests_that_had_their_turn(level):
    """Eight owners of 16 outputs each, and only four places, of which they have one at most."""
    queue = FairQueue(4)
    of = (lambda name: (name, name)) if level == "clients" else (lambda name: ("a", name))
    for id in range(128):
        queue.add(id, of(f"large{id // 16}"))
    running = list(queue.take())
    assert running == [0, 16, 32, 48]
    queue.add(200, of("small"))
    ends = 0
    while 200 not in running:
        queue.remove(running.pop(0))
        running += queue.take()
        ends += 1
    assert ends == 9, "it waits for one place of each that came before it"


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


def test_requests_of_an_owner_are_counted():
    queue = FairQueue(1)
    for id, owner in enumerate("aab"):
        queue.add(id, (owner, id))
    assert list(queue.take()) == [0]
    assert (queue.count("a"), queue.count("b"), queue.count("c")) == (2, 1, 0)
    queue.remove(0)
    assert queue.count("a") == 1
