"""Verification of a block by the target's logits: controls, the rule, and finite checks."""

import jax
import jax.numpy as jnp

from dflash.inference.cycle import verify
from dflash.inference.cycle.block import Block
from dflash.inference.cycle.rules import Rules
from dflash.inference.cycle.state import DecodeState
from dflash.inference.cycle.verify import VerifyResult
from dflash.inference.logits import controls, nonfinite
from dflash.inference.logits.sampling import SequenceSampler
from dflash.kernels.argmax import argmax


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
      block: Rows to verify.
      logits: Logits of the target, float32 [B, R, V] or packed as the block is.
      rules: Static settings of the loop.
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
        result = _reject(block, logits, sampler.params, rules)
        # `sampling.probabilities` takes the same argmax, so XLA computes it only once.
        return result, nonfinite.finite_rows(logits, argmax(logits))
    if sampler.with_probs and block.num_drafts:
        raise ValueError("rejection verification of a proposal without probabilities")
    sampled, finite = block.sample(sampler, logits)
    drafts = block.verified.tokens
    if block.tree is None:
        return verify.coupled_chain(drafts, sampled), finite
    return verify.coupled_tree(drafts, sampled, block.tree), finite


def _reject(block, logits, params, rules) -> VerifyResult:
    """Verifies a chain or a tree by the probabilities of its drafts."""
    drafts, probs, positions = block.proposal.tokens, block.proposal.probs, block.positions + 1
    if block.tree is None:
        rule = verify.block_chain if rules.verify == "block" else verify.rejection_chain
        return rule(drafts, probs, logits, positions, params)
    drawn_from = block.proposal.drawn_from
    if drawn_from is None:
        drawn_from = jnp.broadcast_to(jnp.arange(drafts.shape[1]), drafts.shape)
    return verify.rejection_tree(drafts, probs, drawn_from, logits, positions, params, block.tree)
