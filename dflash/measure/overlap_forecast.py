"""Forecast of overlapped drafting: the time of a cycle from the times of its stages.

    in turn    observe, draft, verify                        all chips do everything
    ssd        observe, (draft if an outcome was missed), verify beside speculate
    pingpong   one half observes and drafts while the other half is verified

Communication between the chips and the host's time are not included.
"""

import dataclasses
from collections.abc import Mapping

from dflash.drafters.base import Drafter
from dflash.drafters.parts.one_pass import OnePassDrafter
from dflash.measure import roofline
from dflash.measure.roofline import ForwardWork, Machine
from dflash.models.decoder import Decoder

IN_TURN, SSD, PING_PONG = "in turn", "ssd", "pingpong"


@dataclasses.dataclass(frozen=True)
class Stages:
    """Times of the stages of a cycle of one batch, each on its own chips, in ms.

    Attributes:
      verify_ms: The target's forward over all blocks.
      observe_ms: The drafter takes in the committed rows.
      draft_ms: The drafter drafts a block of every sequence.
      speculate_ms: The drafter drafts a block for each foreseen outcome of every sequence.
    """

    verify_ms: float
    observe_ms: float
    draft_ms: float
    speculate_ms: float = 0.0


@dataclasses.dataclass(frozen=True)
class DrafterWork:
    """Work of a drafter's stages, for a batch.

    Attributes:
      observe: Work of one observation.
      draft: Work of each pass of a draft, in order; a pass begins when the one before has ended.
      speculate: Work of each pass of a speculation.
    """

    observe: ForwardWork
    draft: tuple[ForwardWork, ...]
    speculate: tuple[ForwardWork, ...]

    def stages(self, verify_ms: float, machine: Machine) -> Stages:
        """Returns the times on a machine, each pass by its roofline."""
        ideal = [
            sum(work.ideal_ms(machine) for work in one) for one in (self.draft, self.speculate)
        ]
        return Stages(verify_ms, self.observe.ideal_ms(machine), *ideal)


def work_of(
    target: Decoder, drafter: Drafter, *, batch: int, drafts: int, fan_out: int, context: int
) -> DrafterWork:
    """Returns the work of a drafter whose `drafts` tokens per sequence are verified.

    A draft model or EAGLE-3 takes one pass per token, and a block drafter one pass per block. The
    context is counted for draft models alone.

    Args:
      target: Target, whose output head a block drafter drafts with.
      drafter: Drafter, which may be abstract.
      batch: Number of sequences.
      drafts: Number of drafts that a cycle verifies.
      fan_out: Number of bonus tokens to foresee for each number of accepted drafts.
      context: Tokens of each sequence before the block.
    """
    forks = batch * (drafts + 1) * fan_out

    def run(sequences: int, rows: int) -> ForwardWork:
        if drafter.drafts_with_model:
            model = drafter.model
            return roofline.target_work(model, batch=sequences, rows=rows, context=context)
        own = roofline.products(drafter, sequences * rows)
        in_one_pass = isinstance(drafter, OnePassDrafter)
        return own + roofline.head_work(target, sequences * rows) if in_one_pass else own

    if isinstance(drafter, OnePassDrafter):
        block, none = drafts + 1, ForwardWork(0, 0)
        return DrafterWork(none, (run(batch, block),), (run(batch, block), run(forks, block)))
    known = (run(batch, drafts),) if drafter.drafts_with_model else (run(batch, 1),) * drafts
    return DrafterWork(
        run(batch, drafts + 1),
        (run(batch, 1),) * (drafts - 1),
        (*known, *(run(forks, 1),) * drafts),
    )


def cycle_ms(stages: Stages) -> float:
    """Returns the time of a cycle whose stages follow one another."""
    return stages.observe_ms + stages.draft_ms + stages.verify_ms


def ssd_cycle_ms(stages: Stages, *, hit_rate: float, batch: int) -> float:
    """Returns the mean time of a cycle that drafts for the outcomes of the next.

    Args:
      stages: Times of the stages.
      hit_rate: Probability that the outcome of one sequence was foreseen. If that of any sequence
        was not, all draft anew.
      batch: Number of sequences.
    """
    missed = 1 - hit_rate**batch
    return stages.observe_ms + missed * stages.draft_ms + max(stages.verify_ms, stages.speculate_ms)


def pingpong_cycle_ms(half: Stages) -> float:
    """Returns the time in which both halves of a batch are drafted and verified once.

    Args:
      half: Times of the stages of one half.
    """
    drafting = half.observe_ms + half.draft_ms
    return max(2 * half.verify_ms, 2 * drafting, half.verify_ms + drafting)


def choose(speeds: Mapping[str, float]) -> str:
    """Returns the way of drafting with the highest speed; the first one of equals."""
    return max(speeds, key=speeds.__getitem__)
