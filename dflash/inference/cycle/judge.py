"""Verification of a proposal by the target's logits: controls, the rule, and finite checks."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dflash.drafters.base import Proposal
from dflash.inference.cycle import block_choice, divided_rows, verify
from dflash.inference.cycle import tree as trees
from dflash.inference.cycle.rules import Rules
from dflash.inference.cycle.state import DecodeState
from dflash.inference.logits import controls, nonfinite
from dflash.inference.logits.sampling import SequenceSampler
from dflash.kernels.argmax import argmax
from dflash.kernels.packing import Packing


class Rows(NamedTuple):
    """Rows that each sequence verifies in a cycle that divides its rows: the first of its block.

    Attributes:
      counts: int32 [B]; rows of each sequence, anchor included; 0 for inactive ones.
      packing: Packing of these rows.
      drafts: Packing of the drafts among them, which come after the anchors.
    """

    counts: jax.Array
    packing: Packing
    drafts: Packing

    def verified(self, drafts: jax.Array) -> jax.Array:
        """Returns the drafts [B, G] with -1 for those without a row; see `verify`."""
        return jnp.where(jnp.arange(1, drafts.shape[1] + 1) < self.counts[:, None], drafts, -1)


def divide(
    state: DecodeState,
    num_drafts: int,
    mean_rows: int,
    rules: Rules,
    confidence: jax.Array | None = None,
) -> Rows:
    """Divides the rows of a cycle among its sequences; see `divided_rows.divide`.

    Args:
      state: State before verification, with statistics of acceptance.
      num_drafts: Number of drafts per sequence.
      mean_rows: Mean number of rows per slot.
      rules: Static settings of the loop.
      confidence: The drafter's confidence in its drafts; None to go by the statistics.
    """
    choice, rates, replicas = state.adaptive.choice, confidence, rules.division.num_replicas
    if rates is None:
        rates = block_choice.rates(choice)[:, :num_drafts]
    survival = block_choice.survival(rates, state.active, rules.left(state), trees=choice.trees)
    counts = divided_rows.divide(survival, state.active, mean_rows, replicas)
    slots = state.active.shape[0] // replicas
    return Rows(
        counts,
        Packing.of(counts, num_drafts + 1, slots * mean_rows, replicas),
        Packing.of(jnp.maximum(counts - 1, 0), num_drafts, slots * (mean_rows - 1), replicas),
    )


def judge(
    state: DecodeState,
    proposal: Proposal,
    tree: trees.Tree | None,
    logits: jax.Array,
    positions: jax.Array,
    rules: Rules,
    allowed: jax.Array | None = None,
    rows: Rows | None = None,
) -> tuple[verify.VerifyResult, jax.Array]:
    """Verifies a proposal and checks each row for finite logits.

    The logits are first shaped by the sequences' controls; see `controls`.

    Args:
      state: State that the proposal was drafted in.
      proposal: Drafts to verify.
      tree: Their tree; None for a chain.
      logits: Logits of the target, float32 [B, R, V]; packed if there are `rows`.
      positions: Positions of the tokens that the rows predict, int32 [B or 1, R].
      rules: Static settings of the loop.
      allowed: Bit masks of the tokens after each row, or None; see `controls.shape_logits`.
      rows: Rows that were divided among sequences; None if all have the same number.
    Returns:
      The result of verification, and a mask of rows with finite logits, bool [B, R].
    """
    sampler = rules.sampler(state)
    verified = proposal
    if rows is not None:
        verified = dataclasses.replace(proposal, tokens=rows.verified(proposal.tokens))

    def judge_rows(logits):
        result = apply_rule(verified, tree, logits, positions, sampler, rules)
        return result, finite_rows(result, logits)

    def judge_shaped():
        padded = logits if rows is None else rows.packing.unpack(logits)
        return judge_rows(shape(state, proposal, tree, allowed, padded))

    def judge_plain():
        if rows is None:
            return judge_rows(logits)
        if proposal.probs is not None:
            return judge_rows(rows.packing.unpack(logits))
        return _judge_packed(verified.tokens, tree, logits, positions, sampler, rows.packing)

    if allowed is not None:
        return judge_shaped()
    if rules.greedy:
        return judge_plain()
    # Trace the rule in each branch: selecting the logits first would copy them.
    with jax.named_scope("if_shaped"):
        shapes = state.controls.shapes(state.length, state.active)
        return jax.lax.cond(shapes, judge_shaped, judge_plain)


def shape(
    state: DecodeState,
    proposal: Proposal,
    tree: trees.Tree | None,
    allowed: jax.Array | None,
    logits: jax.Array,
) -> jax.Array:
    """Returns logits [B, R, V] after the sequences' controls; see `controls.shape_logits`."""
    ancestry = None if tree is None else tree.ancestry
    settings = state.controls, state.length, state.stop_ids
    return controls.shape_logits(logits, *settings, proposal.tokens, ancestry, allowed)


def _judge_packed(drafts, tree, logits, positions, sampler, packing):
    """Verifies by packed logits [D, N, V], each row of which is sampled by itself."""
    flat = logits.reshape(-1, 1, logits.shape[-1])
    by_row, at = sampler.of_rows(packing, positions)
    sampled = by_row.sample(flat, at)
    finite = nonfinite.finite_rows(flat, sampled)
    shape = packing.source.shape
    sampled, finite = (packing.unpack(x.reshape(shape)) for x in (sampled, finite))
    return _couple(drafts, sampled, tree), finite


def apply_rule(
    proposal: Proposal,
    tree: trees.Tree | None,
    logits: jax.Array,
    positions: jax.Array,
    sampler: SequenceSampler,
    rules: Rules,
) -> verify.VerifyResult:
    """Applies the rule of `rules` for the form of the proposal: chain or tree."""
    positions = jnp.broadcast_to(positions, logits.shape[:2])
    if proposal.probs is not None:
        return _reject(proposal, tree, logits, positions, sampler.params, rules)
    if sampler.with_probs and proposal.tokens.shape[1]:
        raise ValueError("rejection verification of a proposal without probabilities")
    return _couple(proposal.tokens, sampler.sample(logits, positions), tree)


def _couple(drafts, sampled, tree) -> verify.VerifyResult:
    """Compares a chain or a tree with the target's own tokens."""
    if tree is None:
        return verify.coupled_chain(drafts, sampled)
    return verify.coupled_tree(drafts, sampled, tree)


def _reject(proposal, tree, logits, positions, params, rules) -> verify.VerifyResult:
    """Verifies a chain or a tree by the probabilities of its drafts."""
    tokens, probs = proposal.tokens, proposal.probs
    if tree is None:
        rule = verify.block_chain if rules.verify == "block" else verify.rejection_chain
        return rule(tokens, probs, logits, positions, params)
    drawn_from = proposal.drawn_from
    if drawn_from is None:
        drawn_from = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return verify.rejection_tree(tokens, probs, drawn_from, logits, positions, params, tree)


def finite_rows(result: verify.VerifyResult, logits: jax.Array) -> jax.Array:
    """Returns a mask of the rows with finite logits, bool [B, R]."""
    picked = result.sampled
    if picked is None:
        # `sampling.probabilities` takes the same argmax, so XLA computes it only once.
        picked = argmax(logits)
    return nonfinite.finite_rows(logits, picked)
