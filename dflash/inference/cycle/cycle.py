"""One decode cycle, as pure device functions: draft, verify, commit, observe."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dflash.drafters.base import Drafter, Proposal
from dflash.inference.cycle import verify
from dflash.inference.cycle.block import Block
from dflash.inference.cycle.rules import Rules
from dflash.inference.cycle.state import DecodeState
from dflash.inference.cycle.verify import VerifyResult
from dflash.inference.logits import controls, logprobs, nonfinite
from dflash.inference.logits.logprobs import Logprobs
from dflash.inference.logits.sampling import SequenceSampler
from dflash.kernels import unembed_tiles
from dflash.kernels.argmax import argmax
from dflash.models.decoder import Decoder, TargetOutput


class Outcome(NamedTuple):
    """Tokens committed by one cycle.

    Attributes:
      tokens: int32 [B, longest path].
      count: int32 [B]; number of valid entries in each row of `tokens`.
      accepted: int32 [B]; number of accepted drafts among them: all, or all but the bonus token.
      logprobs: Log-probabilities of the tokens, zero where no sequence requests them.
      rejected: int32 [B, drafts]; rejected drafts, and -1 in place of others.
      rows: int32 [B]; number of rows that were verified.
    """

    tokens: jax.Array
    count: jax.Array
    accepted: jax.Array
    logprobs: Logprobs
    rejected: jax.Array
    rows: jax.Array


def cycle(
    target: Decoder,
    drafter: Drafter,
    state: DecodeState,
    *,
    rules: Rules,
    block_size: int,
    mean_rows: int | None = None,
) -> tuple[DecodeState, Outcome]:
    """Advances every active slot by one draft and one target forward.

    Args:
      target: Model that verifies.
      drafter: Strategy that proposes.
      state: Decode state that satisfies the invariant of `DecodeState`.
      rules: Static settings of the loop.
      block_size: Rows to draft, anchor included, at most the drafter's block size.
      mean_rows: Mean number of rows per slot to verify, divided among the sequences; None to verify
        `block_size` rows of each.
    """
    state, proposal = propose(target, drafter, state, rules=rules, block_size=block_size)
    block = block_of(drafter, state, proposal)
    if mean_rows is not None:
        block = block.divided(state.active, rules.room(state), mean_rows, rules.choices)
    return conclude(target, drafter, state, block, rules=rules)


def exact_cycle(
    target: Decoder, drafter: Drafter, state: DecodeState, *, rules: Rules
) -> tuple[DecodeState, Outcome]:
    """Advances every active slot by one cycle of the chosen size, in the program of all sizes.

    Only the draft depends on the choice. The target computes the same rows in any case, so plain
    decoding and verification have the same bits.
    """
    sizes = rules.block_sizes

    def drafted(size):
        after, proposal = propose(target, drafter, state, rules=rules, block_size=size)
        missing = sizes[-1] - 1 - proposal.tokens.shape[1]
        return after.drafter, jnp.pad(proposal.tokens, ((0, 0), (0, missing)))

    branches = [functools.partial(drafted, size) for size in sizes]
    drafter_state, tokens = jax.lax.switch(state.choice.index, branches)
    state = dataclasses.replace(state, drafter=drafter_state)
    block = block_of(drafter, state, Proposal(tokens))
    block = block.limited(jnp.array(sizes)[state.choice.index])
    return conclude(target, drafter, state, block, rules=rules)


def propose(
    target: Decoder, drafter: Drafter, state: DecodeState, *, rules: Rules, block_size: int
) -> tuple[DecodeState, Proposal]:
    """Drafts a block of `block_size` rows for every slot; see `cycle`."""
    count, sampler = block_size - 1, rules.sampler(state)
    where = state.drafter, state.anchor, state.length - 1, sampler, target
    with jax.named_scope("drafter"):
        if count == 0:
            return state, Proposal(jnp.zeros((state.anchor.shape[0], 0), jnp.int32))
        if count == drafter.num_draft_tokens:
            proposal, drafter_state = drafter.draft(*where)
        else:
            proposal, drafter_state = drafter.draft_fewer(count, *where)
    return dataclasses.replace(state, drafter=drafter_state), proposal


def block_of(drafter: Drafter, state: DecodeState, proposal: Proposal) -> Block:
    """Returns the block that verifies the whole proposal of every slot."""
    return Block.of(proposal, state.anchor, state.length - 1, drafter.longest_path)


def conclude(
    target: Decoder,
    drafter: Drafter,
    state: DecodeState,
    block: Block,
    *,
    rules: Rules,
    allowed: jax.Array | None = None,
) -> tuple[DecodeState, Outcome]:
    """Verifies a block, commits, and lets the drafter observe: the second part of `cycle`.

    Args:
      state: State returned by `propose`.
      allowed: int32 [B, R, ceil(V / 32)] or None; bit mask of the tokens that may follow each row,
        see `controls.shape_logits`.
    """
    output = _forward(target, drafter, state, block, rules.choices.computed)
    result, finite, scores = _verify(target, state, block, output.hidden, rules, allowed)
    drafter_state, result = _review(drafter, state.drafter, block, result, rules)
    committed = result.following(block.tokens)
    count, active, nonfinite_at = _commit(state, committed, result.along(finite), result)
    outcome = Outcome(
        committed,
        count,
        jnp.minimum(result.num_accepted, count),
        scores,
        _rejected(block, result),
        block.counts,
    )
    cache, features = _keep_path(target, state, output, block, result, count)
    following = jnp.concatenate([state.anchor[:, None], committed], axis=1)
    choice = state.choice.learn(block, result, count, state.limit - state.length)
    drafter_state, choice = choice.observe(
        drafter, drafter_state, state.length - 1, following, count, features, target
    )
    state = dataclasses.replace(
        state,
        length=state.length + count,
        anchor=jnp.take_along_axis(following, count[:, None], axis=1)[:, 0],
        active=active,
        controls=state.controls.with_tokens(state.length, committed, count),
        cache=cache,
        drafter=drafter_state,
        choice=choice,
        nonfinite_at=nonfinite_at,
    )
    return state, outcome


def _forward(target, drafter, state, block, computed: int | None) -> TargetOutput:
    """Runs the target over the rows of a block, or over `computed` rows of each sequence."""
    rows = (block.tokens, block.positions) if computed is None else block.padded(computed)
    with jax.named_scope("target"):
        output = target(
            *rows,
            state.cache,
            feature_layers=drafter.feature_layers,
            tree_mask=block.ancestry,
            packing=block.packing,
            adapters=state.adapter,
        )
    # The barriers here and in `_verify` keep XLA from computing fewer rows.
    return output if computed is None else jax.lax.optimization_barrier(output)


def _verify(
    target, state, block, hidden, rules, allowed
) -> tuple[VerifyResult, jax.Array, Logprobs]:
    """Returns the results of `judge` and `_scores`, from logits only where a sequence needs them.

    The logits of a batch are larger than all else that a cycle computes. A program for greedy
    requests has no room for them; another one has, but writes them only in the last branch.
    """
    sampler, exact = rules.sampler(state), rules.choices.exact

    def from_logits():
        logits = target.unembed(hidden)
        if exact:
            logits = block.unpack(jax.lax.optimization_barrier(logits))
        result, finite = judge(state, block, logits, rules, allowed)
        return result, finite, _scores(state, block, result, logits, rules, allowed)

    def from_tiles(sampler):
        sampled, finite = block.sample_in_tiles(sampler, target, hidden)
        result = _couple(block, sampled)
        shape = result.following(block.tokens).shape
        return result, finite, logprobs.zeros(shape, target.arch.vocab_size)

    if exact or allowed is not None or block.proposal.probs is not None:
        return from_logits()
    if not target.unembeds_in_tiles(hidden):
        return from_logits()
    greedy = functools.partial(from_tiles, dataclasses.replace(sampler, greedy=True))
    if rules.greedy:
        return greedy()
    branches = [greedy, from_logits]
    if unembed_tiles.noise_pays(target.sharding):
        branches.insert(1, functools.partial(from_tiles, sampler))
    needs_logits = state.controls.shapes(state.length, state.active)
    needs_logits |= jnp.any(state.active & (state.controls.logprobs | sampler.params.filters))
    samples = jnp.any(state.active & (sampler.params.temperature > 0))
    branch = jnp.where(needs_logits, 2, samples.astype(jnp.int32))
    with jax.named_scope("if_logits"):
        return jax.lax.switch(branch, branches)  # It takes the last branch for larger numbers.


def judge(
    state: DecodeState,
    block: Block,
    logits: jax.Array,
    rules: Rules,
    allowed: jax.Array | None = None,
) -> tuple[VerifyResult, jax.Array]:
    """Verifies a block and checks each row for finite logits.

    The logits are first shaped by the sequences' controls; see `controls`.

    Args:
      state: State that the block was drafted in.
      logits: Logits of the target, float32 [B, R, V] or packed as the block is.
      allowed: Bit masks of the tokens after each row, or None; see `controls.shape_logits`.
    Returns:
      The result of verification, and a mask of rows with finite logits, bool [B, R].
    """
    sampler = rules.sampler(state)

    def judge_plain():
        return apply_rule(block, logits, sampler, rules)

    def judge_shaped():
        shaped = shape(state, block, allowed, block.unpack(logits))
        return apply_rule(block, block.pack(shaped), sampler, rules)

    if allowed is not None:
        return judge_shaped()
    if rules.greedy:
        return judge_plain()
    # Trace the rule in each branch: selecting the logits first would copy them.
    with jax.named_scope("if_shaped"):
        shapes = state.controls.shapes(state.length, state.active)
        return jax.lax.cond(shapes, judge_shaped, judge_plain)


def shape(
    state: DecodeState, block: Block, allowed: jax.Array | None, logits: jax.Array
) -> jax.Array:
    """Returns logits [B, R, V] after the sequences' controls; see `controls.shape_logits`."""
    settings = state.controls, state.length, state.stop_ids
    drafts = block.proposal.tokens
    return controls.shape_logits(logits, *settings, drafts, block.ancestry, allowed)


def apply_rule(
    block: Block, logits: jax.Array, sampler: SequenceSampler, rules: Rules
) -> tuple[VerifyResult, jax.Array]:
    """Applies the rule of `rules` to a chain or a tree; returns what `judge` does.

    Raises:
      ValueError: A rejection rule, but the proposal has no probabilities.
    """
    if block.proposal.probs is not None:
        result = _reject(block, logits, sampler.params)
        # `sampling.probabilities` takes the same argmax, so XLA computes it only once.
        return result, nonfinite.finite_rows(logits, argmax(logits))
    if sampler.with_probs and block.num_drafts:
        raise ValueError("rejection verification of a proposal without probabilities")
    sampled, finite = block.sample(sampler, logits)
    return _couple(block, sampled), finite


def _couple(block: Block, sampled: jax.Array) -> VerifyResult:
    """Verifies a chain or a tree by the target's tokens after its rows, int32 [B, R]."""
    drafts = block.verified.tokens
    if block.tree is None:
        return verify.coupled_chain(drafts, sampled)
    return verify.coupled_tree(drafts, sampled, block.tree)


def _reject(block, logits, params) -> VerifyResult:
    """Verifies a chain or a tree by the probabilities of its drafts."""
    drafts, probs, positions = block.proposal.tokens, block.proposal.probs, block.positions + 1
    if block.tree is None:
        return verify.rejection_chain(drafts, probs, logits, positions, params)
    drawn_from = block.proposal.drawn_from
    if drawn_from is None:
        drawn_from = jnp.broadcast_to(jnp.arange(drafts.shape[1]), drafts.shape)
    return verify.rejection_tree(drafts, probs, drawn_from, logits, positions, params, block.tree)


def _review(
    drafter: Drafter, drafter_state: Any, block: Block, result: VerifyResult, rules: Rules
) -> tuple[Any, VerifyResult]:
    """Shows the target's samples to the drafter, and applies `rules.revise` to the result."""
    if result.sampled is not None:
        drafter_state = drafter.review(drafter_state, block.verified, result.sampled)
    if rules.revise is not None:
        result = rules.revise(drafter, drafter_state, result)
        accepted = jnp.minimum(result.num_accepted, jnp.maximum(block.counts - 1, 0))
        result = result._replace(num_accepted=accepted)
    return drafter_state, result


def _commit(
    state: DecodeState, committed: jax.Array, finite: jax.Array, result: VerifyResult
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Truncates the accepted tokens at the limit, the first stop token, or a non-finite row.

    Returns:
      Number of committed tokens, int32 [B]; active bool [B] and nonfinite_at int32 [B] after the
      cycle.
    """
    count = jnp.minimum(result.num_accepted + 1, state.limit - state.length)
    stops = jnp.any(committed[..., None] == state.stop_ids[:, None], axis=-1)
    stops &= jnp.arange(committed.shape[1]) < count[:, None]
    stopped = stops.any(axis=1)
    count = jnp.where(stopped, jnp.argmax(stops, axis=1).astype(jnp.int32) + 1, count)
    count = jnp.where(state.active, count, 0)
    active = state.active & ~stopped & (state.length + count < state.limit)
    nonfinite_rows = ~finite & (jnp.arange(finite.shape[1]) < count[:, None])
    has_nonfinite = nonfinite_rows.any(axis=1)
    first = jnp.argmax(nonfinite_rows, axis=1).astype(jnp.int32)
    nonfinite_at = jnp.where(has_nonfinite, state.length + first, state.nonfinite_at)
    return jnp.where(has_nonfinite, first, count), active & (nonfinite_at == 0), nonfinite_at


def _scores(state, block, result, logits, rules, allowed) -> Logprobs:
    """Returns the log-probabilities of the committed tokens, where sequences request them."""
    committed = result.following(block.tokens)
    if rules.greedy:
        return logprobs.zeros(committed.shape, logits.shape[-1])

    def rows():
        padded = block.unpack(logits)
        shaped = shape(state, block, allowed, padded)
        return result.along(padded), result.along(shaped)

    wanted = state.controls.logprobs & state.active
    return logprobs.of_tokens(rows, state.sampling, committed, wanted, logits.shape[-1])


def _rejected(block: Block, result: VerifyResult) -> jax.Array:
    """Returns the rejected drafts [B, G], with -1 in place of accepted ones."""
    accepted = result.on_path(result.num_accepted, block.num_drafts)
    return jnp.where(accepted, -1, block.verified.tokens)


def _keep_path(target, state, output, block, result, count):
    """Returns the cache and the features of the accepted path; a chain keeps all of its rows."""
    with jax.named_scope("target"), jax.named_scope("attention"):
        cache = output.cache.commit(state.length - 1, count, result.path, target.sharding)
    return cache, result.along(block.unpack(output.features))
