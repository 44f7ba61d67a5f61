"""Order in which waiting requests get the scheduler's slots, shared out over their owners."""

import dataclasses
import time
from collections.abc import Callable, Hashable, Iterator, Sequence


@dataclasses.dataclass
class _Share:
    """Share of an owner in the places of its parent, such as of a request in those of its client.

    Attributes:
      used_s: Time of places that it has used, plus what each of its rivals had used when it came.
      rivals_used_s: The same for a newcomer among its own children.
    """

    count: int = 0
    num_taken: int = 0
    used_s: float = 0.0
    rivals_used_s: float = 0.0
    children: int = 0


class FairQueue:
    """Requests in front of a scheduler, which would serve them first come, first served.

    The next request is one of the owner that holds the fewest places, and among equals of the one
    that has used places for the shortest time. Owners form levels, such as (client, HTTP request):
    clients share the places evenly, and so do the requests of a client. A newcomer begins where an
    owner stands that has always had its share, so none waits forever. Requests with a lower
    priority number go before all others.
    """

    def __init__(self, places: int, clock: Callable[[], float] = time.monotonic):
        """Creates an empty queue; at most `places` requests are taken and not yet removed."""
        self._places, self._clock = places, clock
        self._waiting: dict[int, Sequence[Hashable]] = {}  # Owners by id, in order of arrival.
        self._priorities: dict[int, int] = {}  # Of waiting requests.
        self._taken: dict[int, tuple[Sequence[Hashable], float]] = {}  # Owners, and since when.
        # Shares by path of owners; the empty path is the parent of the first level.
        self._shares: dict[tuple[Hashable, ...], _Share] = {(): _Share()}

    @property
    def waiting(self) -> int:
        """Number of requests that have not been taken."""
        return len(self._waiting)

    def add(self, id: int, owners: Sequence[Hashable], priority: int = 0) -> None:
        """Adds a request with its owner on each level."""
        self._waiting[id], self._priorities[id] = owners, priority
        for path in _paths(owners):
            if path not in self._shares:
                parent = self._shares[path[:-1]]
                parent.children += 1
                self._shares[path] = _Share(used_s=parent.rivals_used_s)
            self._shares[path].count += 1

    def count(self, owner: Hashable) -> int:
        """Returns the number of requests of an owner on the first level, waiting or taken."""
        return self._shares.get((owner,), _Share()).count

    def take(self) -> Iterator[int]:
        """Yields the requests that get a place now."""
        while self._waiting and len(self._taken) < self._places:
            id = min(self._waiting, key=self._order_of)
            owners = self._waiting.pop(id)
            self._taken[id] = owners, self._clock()
            del self._priorities[id]
            for path in _paths(owners):
                self._shares[path].num_taken += 1
            yield id

    def remove(self, id: int) -> bool:
        """Removes a request that has ended; returns whether it had been taken."""
        self._priorities.pop(id, None)
        was_taken = id in self._taken
        owners, since = self._taken.pop(id, None) or (self._waiting.pop(id, ()), 0.0)
        used_s = self._clock() - since if was_taken else 0.0
        for path in reversed(list(_paths(owners))):
            share, parent = self._shares[path], self._shares[path[:-1]]
            share.count -= 1
            share.num_taken -= was_taken
            share.used_s += used_s
            parent.rivals_used_s += used_s / parent.children
            if not share.count:
                parent.children -= 1
                del self._shares[path]
        return was_taken

    def _order_of(self, id: int) -> list[float]:
        shares = (self._shares[path] for path in _paths(self._waiting[id]))
        used = (value for share in shares for value in (share.num_taken, share.used_s))
        return [self._priorities[id], *used]


def _paths(owners: Sequence[Hashable]) -> Iterator[tuple[Hashable, ...]]:
    """Yields the paths of owners from the first level to each level."""
    for end in range(1, len(owners) + 1):
        yield tuple(owners[:end])
