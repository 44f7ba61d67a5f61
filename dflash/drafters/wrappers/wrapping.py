"""Assembly of a drafter with its wrappers."""

from dflash.drafters.base import Drafter
from dflash.drafters.wrappers.chosen_window import ChosenWindow
from dflash.drafters.wrappers.copies import WithCopies
from dflash.parallel.sharding import Sharding


def wrapped(drafter: Drafter, *, copies: bool, sharding: Sharding) -> Drafter:
    """Returns a drafter with the wrappers that it and the config ask for.

    Args:
      drafter: Strategy to wrap; returned as it is if nothing is to be chosen.
      copies: Whether copies of the context may replace drafts.
      sharding: Sharding of the wrappers' states.
    """
    if drafter.windows:
        drafter = ChosenWindow(drafter, sharding)
    if copies and drafter.num_draft_tokens:
        drafter = WithCopies(drafter, sharding)
    return drafter
