"""Order in which waiting requests get the scheduler's slots, shared out over their owners."""

import collections
from collections.abc import Hashable, Iterator, Sequence


class FairQueue:
    """Requests in front of a scheduler, which would serve them first come, first served.

    The next request is one of the owner that holds the fewest places. Owners form levels, such as
    (client, HTTP request): clients share the places evenly, and so do the requests of a client. The
    earliest request goes first among equals, so that none waits forever. Requests with a lower
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
        self._held: collections.Counter[Hashable] = collections.Counter()  # Places by owner.

    @property
    def waiting(self) -> int:
        """Number of requests that have not been taken."""
        return len(self._waiting)

    def add(self, id: int, owners: Sequence[Hashable], priority: int = 0) -> None:
        """Adds a request with its owner on each level."""
        self._waiting[id], self._priorities[id] = owners, priority

    def count(self, owner: Hashable) -> int:
        """Returns the number of requests of an owner that wait or have a place."""
        return sum(owner in one for one in (*self._waiting.values(), *self._taken.values()))

    def take(self) -> Iterator[int]:
        """Yields the requests that get a place now."""
        while self._waiting and len(self._taken) < self._places:
            id = min(self._waiting, key=self._order_of)
            self._taken[id] = self._waiting.pop(id)
            del self._priorities[id]
            self._held.update(self._taken[id])
            yield id

    def remove(self, id: int) -> bool:
        """Removes a request that has ended; returns whether it had been taken."""
        self._waiting.pop(id, None)
        self._priorities.pop(id, None)
        owners = self._taken.pop(id, None)
        for owner in owners or ():
            self._held[owner] -= 1
            if not self._held[owner]:
                del self._held[owner]
        return owners is not None

    def _order_of(self, id: int) -> list[int]:
        return [self._priorities[id], *(self._held[owner] for owner in self._waiting[id])]
