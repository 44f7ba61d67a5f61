"""Order in which waiting requests get the scheduler's slots, shared out over their owners."""

import collections
import itertools
from collections.abc import Hashable, Iterator, Sequence


class FairQueue:
    """Requests in front of a scheduler, which would serve them first come, first served.

    The next request is one of the owner that holds the fewest places. Owners form levels, such as
    (client, HTTP request): clients share the places evenly, and so do the requests of a client.
    Equals take turns: an owner that gets a place goes to the end of the line, where new owners
    begin. So nobody waits longer than for one place of each of the others. Requests with a lower
    priority number go before all others.
    """

    def __init__(self, places: int):
        """Creates an empty queue.

        Args:
          places: Number of requests that may be taken and not yet removed.
        """
        self._places = places
        self._waiting: dict[int, Sequence[Hashable]] = {}  # Owners by id, in order of arrival.
        self._priorities: dict[int, int] = {}  # Of waiting requests.
        self._taken: dict[int, Sequence[Hashable]] = {}
        self._counts: collections.Counter[Hashable] = collections.Counter()  # Requests by owner.
        self._held: collections.Counter[Hashable] = collections.Counter()  # Places by owner.
        self._turns: dict[Hashable, int] = {}  # Places in the line of equals, by owner.
        self._last_turn = itertools.count()

    @property
    def waiting(self) -> int:
        """Number of requests that have not been taken."""
        return len(self._waiting)

    def add(self, id: int, owners: Sequence[Hashable], priority: int = 0) -> None:
        """Adds a request with its owner on each level."""
        self._waiting[id], self._priorities[id] = owners, priority
        self._counts.update(owners)
        for owner in owners:
            self._turns.setdefault(owner, next(self._last_turn))

    def count(self, owner: Hashable) -> int:
        """Returns the number of requests of an owner that wait or have a place."""
        return self._counts[owner]

    def take(self) -> Iterator[int]:
        """Yields the requests that get a place now."""
        while self._waiting and len(self._taken) < self._places:
            id = min(self._waiting, key=self._order_of)
            owners = self._taken[id] = self._waiting.pop(id)
            del self._priorities[id]
            self._held.update(owners)
            self._turns.update((owner, next(self._last_turn)) for owner in owners)
            yield id

    def remove(self, id: int) -> bool:
        """Removes a request that has ended; returns whether it had been taken."""
        was_taken = id in self._taken
        owners = self._waiting.pop(id, None) or self._taken.pop(id, None) or ()
        self._priorities.pop(id, None)
        self._counts.subtract(owners)
        if was_taken:
            self._held.subtract(owners)
        for owner in owners:
            if not self._counts[owner]:
                del self._counts[owner], self._held[owner], self._turns[owner]
        return was_taken

    def _order_of(self, id: int) -> list[int]:
        owners = self._waiting[id]
        turns = ((self._held[owner], self._turns[owner]) for owner in owners)
        return [self._priorities[id], *itertools.chain.from_iterable(turns)]
