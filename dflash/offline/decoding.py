"""Decoding of a list of requests, the simplest client of the scheduler."""

from collections.abc import Callable, Iterable, Iterator

from dflash.inference.engine import Engine
from dflash.inference.request import Event, Request, RequestOutput
from dflash.inference.scheduler import Scheduler
from dflash.inference.stats import SchedulerStats


def decode(
    engine: Engine,
    requests: Iterable[Request],
    tell: Callable[[SchedulerStats], None] = lambda stats: None,
) -> Iterator[Event]:
    """Decodes requests in order of arrival, as many at a time as there are slots.

    Args:
      tell: Called at the end with the scheduler's statistics.
    Yields:
      Tokens as they are committed, and one RequestOutput per request after its last Tokens.
    Raises:
      InputError: A request cannot be decoded. It is raised before any request has started.
      UserError: A request has failed, such as by logits that are not finite.
    """
    scheduler = Scheduler(engine, fill_at_once=True)
    for request in requests:
        scheduler.submit(request)
    while not scheduler.idle:
        for event in scheduler.step():
            if isinstance(event, RequestOutput) and event.error is not None:
                raise event.error
            yield event
    tell(scheduler.stats())
    scheduler.close()
