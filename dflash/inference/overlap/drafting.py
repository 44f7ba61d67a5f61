"""The drafter's part of overlapped decoding, as pure functions of arrays on its own devices."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dflash.drafters.base import Drafter, Heads, Proposal
from dflash.inference.logits.sampling import SamplingParams, SequenceSampler
from dflash.inference.overlap import speculation
from dflash.inference.overlap.relay import Mail
from dflash.inference.overlap.speculation import ChainSampler, SpeculationCache

MISS, HIT, NO_LOOKUP = 0, 1, -1  # What a sequence's lookup in the speculation cache found.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Observed:
    """Drafter's state of B sequences.

    Attributes:
      state: State of the drafter.
      features: Features of the last observed rows, [B, C·D].
    """

    state: Any
    features: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftingState:
    """State of the drafter's devices for a group of B slots.

    Attributes:
      observed: State of the drafter, which covers the positions before the anchors.
      anchor: Last committed tokens, int32 [B].
      position: Positions of the anchors, int32 [B].
      sampling: Sampling parameters of the sequences.
      proposal: Proposal that the target verifies.
      cache: Drafts for the likely outcomes of that verification; None without speculation.
    """

    observed: Observed
    anchor: jax.Array
    position: jax.Array
    sampling: SamplingParams
    proposal: Proposal
    cache: SpeculationCache | None


def observe(drafter: Drafter, heads: Heads, observed: Observed, mail: Mail) -> Observed:
    """Returns the state after the committed rows of all sequences."""
    state = drafter.observe(
        observed.state, mail.position, mail.tokens, mail.num_committed, mail.features, heads
    )
    last = jnp.maximum(mail.num_committed - 1, 0)[:, None, None]
    newest = jnp.take_along_axis(mail.features, last, axis=1)[:, 0]
    some = (mail.num_committed > 0)[:, None]
    return Observed(state, jnp.where(some, newest, observed.features))


def observe_prompts(
    heads: Heads, drafter: Drafter, observed: Observed, mail: Mail, fresh: jax.Array
) -> Observed:
    """Observes a chunk of each prompt; the prompts that are `fresh`, bool [n], begin with it."""
    cleared = Observed(
        drafter.clear(observed.state, fresh), jnp.where(fresh[:, None], 0, observed.features)
    )
    return observe(drafter, heads, cleared, mail)


def insert(
    drafter: Drafter,
    drafting: DraftingState,
    observed: Observed,
    anchors: jax.Array,
    prefill_slot: jax.Array,
    slot: jax.Array,
    length: jax.Array,
    sampling: SamplingParams,
) -> DraftingState:
    """Puts a prefilled sequence of `length` tokens, anchor included, into a slot of the group."""
    params = jax.tree.map(lambda x: x[None], sampling).with_keys()
    features = observed.features[prefill_slot]
    return dataclasses.replace(
        drafting,
        observed=Observed(
            drafter.insert(drafting.observed.state, observed.state, prefill_slot, slot),
            drafting.observed.features.at[slot].set(features),
        ),
        anchor=drafting.anchor.at[slot].set(anchors[prefill_slot]),
        position=drafting.position.at[slot].set(length - 1),
        sampling=jax.tree.map(
            lambda batch, one: batch.at[slot].set(one[0]), drafting.sampling, params
        ),
    )


def draft(heads: Heads, drafter: Drafter, drafting: DraftingState) -> DraftingState:
    """Drafts for all sequences of the group from their states."""
    proposal, state = _draft(heads, drafter, drafting)
    observed = dataclasses.replace(drafting.observed, state=state)
    return dataclasses.replace(drafting, observed=observed, proposal=proposal)


def advance(
    heads: Heads, drafter: Drafter, drafting: DraftingState, mail: Mail, active: jax.Array
) -> tuple[DraftingState, jax.Array]:
    """Takes in a verification, and proposes the next drafts.

    Drafts come from the speculation cache if it has those of every active sequence. Otherwise all
    sequences draft anew, which takes as long as for a single one.

    Args:
      heads: Embedding and output head of the target.
      drafter: The drafter.
      drafting: State of the group.
      mail: Committed rows; none for a sequence whose cycle did not run, which keeps its drafts.
      active: Sequences that go on, bool [B].
    Returns:
      The state with the next proposal; and MISS, HIT or NO_LOOKUP of each sequence, int32 [1, B],
      as in a `Report`.
    """
    ran = mail.num_committed > 0
    newest = jnp.take_along_axis(mail.tokens, mail.num_committed[:, None], axis=1)[:, 0]
    before = drafting
    drafting = dataclasses.replace(
        drafting,
        observed=observe(drafter, heads, drafting.observed, mail),
        anchor=jnp.where(ran, newest, drafting.anchor),
        position=jnp.where(ran, mail.position + mail.num_committed, drafting.position),
        # A slot that is empty is greedy, so that a batch of greedy sequences skips all noise.
        sampling=dataclasses.replace(
            drafting.sampling, temperature=jnp.where(active, drafting.sampling.temperature, 0)
        ),
    )
    if before.cache is None:
        return draft(heads, drafter, drafting), jnp.full((1, *ran.shape), NO_LOOKUP, jnp.int32)
    accepted = jnp.maximum(mail.num_committed - 1, 0)
    foreseen, cached = before.cache.find(accepted, newest)
    cached = jnp.where(ran[:, None], cached, before.proposal.tokens)
    drafting = dataclasses.replace(drafting, proposal=Proposal(cached))
    # XLA may copy the caches at a branch; a loop of at most one turn updates them in place.
    _, drafting = jax.lax.while_loop(
        lambda carry: carry[0],
        lambda carry: (jnp.zeros_like(carry[0]), draft(heads, drafter, carry[1])),
        (jnp.any(~foreseen & ran & active), drafting),
    )
    found = jnp.where(ran & active, jnp.where(foreseen, HIT, MISS), NO_LOOKUP)
    return drafting, found[None].astype(jnp.int32)


def speculate(
    heads: Heads, drafter: Drafter, drafting: DraftingState, *, fan_out: int
) -> DraftingState:
    """Drafts for the likely outcomes of the verification of the present proposal.

    Args:
      heads: Embedding and output head of the target.
      drafter: The drafter; it drafts chains, one token longer than the proposal.
      drafting: State of the group.
      fan_out: Number of bonus tokens to foresee for each number of accepted drafts.
    """
    state, drafts = drafting.observed.state, drafting.proposal.tokens
    where = drafting.anchor, drafting.position
    chain = jnp.pad(drafts, ((0, 0), (0, 1)))
    sampler = ChainSampler(
        drafting.sampling, chain=chain, start=drafting.position + 1, count=fan_out + 1
    )
    followed, state = drafter.follow(state, *where, sampler, heads)
    bonus = speculation.guess(followed.probs, drafts)
    tokens, num_committed = speculation.continuations(drafting.anchor, drafts, bonus)
    count = num_committed.shape[1]
    forked = drafter.fork(
        state, drafting.position, tokens, num_committed, drafting.observed.features, heads
    )
    position, params = jax.tree.map(
        lambda x: jnp.repeat(x, count, axis=0), (drafting.position, drafting.sampling)
    )
    anchors = jnp.take_along_axis(tokens, num_committed[..., None], axis=2).reshape(-1)
    position = position + num_committed.reshape(-1)
    ahead, forked = drafter.draft_fewer(
        drafts.shape[1], forked, anchors, position, SequenceSampler(params), heads
    )
    cache = SpeculationCache(bonus, ahead.tokens.reshape(*bonus.shape, -1))
    observed = dataclasses.replace(drafting.observed, state=drafter.close_forks(state, forked))
    return dataclasses.replace(drafting, observed=observed, cache=cache)


def _draft(heads, drafter, drafting: DraftingState) -> tuple[Proposal, Any]:
    """Drafts as many tokens as the target verifies; returns them and the drafter's state."""
    count, state = drafting.proposal.tokens.shape[1], drafting.observed.state
    where = drafting.anchor, drafting.position, SequenceSampler(drafting.sampling), heads
    if count == drafter.num_draft_tokens:
        proposal, state = drafter.draft(state, *where)
    else:
        proposal, state = drafter.draft_fewer(count, state, *where)
    # Verification reads the tokens and their tree alone.
    return Proposal(proposal.tokens, proposal.parents), state
