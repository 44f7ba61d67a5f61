"""One cycle: draft, verify, commit, observe. Pure, and wholly on the device."""

import dataclasses

import jax
import jax.numpy as jnp

from dflash.drafters.base import Drafter, Proposal
from dflash.inference import tree as trees
from dflash.inference import verify
from dflash.inference.sampling import SequenceSampler
from dflash.inference.state import DecodeState, Report
from dflash.models.decoder import Decoder


@dataclasses.dataclass(frozen=True)
class Rules:
    """What is fixed for a whole run.

    Attributes:
      rejection: verify by rejection, not by coupling.
      stop_ids: tokens that end a sequence.
    """

    rejection: bool = False
    stop_ids: tuple[int, ...] = ()

    def is_stop(self, tokens: jax.Array) -> jax.Array:
        """bool [...]; which of `tokens` int32 [...] end a sequence."""
        return jnp.any(tokens[..., None] == jnp.array(self.stop_ids, jnp.int32), axis=-1)


def cycle(
    target: Decoder, drafter: Drafter, state: DecodeState, *, rules: Rules
) -> tuple[DecodeState, jax.Array, jax.Array]:
    """Advances every active slot by one draft and one target forward.

    Args:
      target: the model whose tokens count.
      drafter: proposes tokens.
      state: see the invariant there.
      rules: of the run.
    Returns:
      state, committed tokens int32 [B, R], num_committed int32 [B].
    """
    position = state.length - 1
    sampler = SequenceSampler(state.sampling, with_probs=rules.rejection)
    proposal, drafter_state = drafter.draft(state.drafter, state.anchor, position, sampler, target)

    rows = jnp.concatenate([state.anchor[:, None], proposal.tokens], axis=1)
    tree = None if proposal.parents is None else trees.from_parents(proposal.parents)
    depth = jnp.arange(rows.shape[1]) if tree is None else tree.depth
    positions = position[:, None] + depth
    output = target(
        rows,
        jnp.broadcast_to(positions, rows.shape),
        state.cache,
        feature_layers=drafter.feature_layers,
        tree_mask=None if tree is None else tree.ancestry,
    )
    logits = target.unembed(output.hidden)
    verdict = _verify(proposal, tree, logits, positions + 1, sampler)

    features, cache = output.features, output.cache
    committed = _following_tokens(rows, verdict)
    if verdict.path is not None:
        cache = cache.compact(position, verdict.path, target.sharding)
        features = jnp.take_along_axis(features, verdict.path[..., None], axis=1)
    num_committed, active = _commit(state, committed, verdict.num_accepted + 1, rules)
    drafter_state = drafter.observe(
        drafter_state,
        position,
        jnp.concatenate([state.anchor[:, None], committed], axis=1),
        num_committed,
        features,
    )
    last = jnp.maximum(num_committed - 1, 0)[:, None]
    anchor = jnp.take_along_axis(committed, last, axis=1)[:, 0]
    state = dataclasses.replace(
        state,
        length=state.length + num_committed,
        anchor=jnp.where(num_committed > 0, anchor, state.anchor),
        active=active,
        cache=cache,
        drafter=drafter_state,
    )
    return state, committed, num_committed


def run_cycles(
    target: Decoder, drafter: Drafter, state: DecodeState, *, max_cycles: int, rules: Rules
) -> tuple[DecodeState, Report]:
    """Runs cycles until `max_cycles` are done or no slot is active; see `cycle`."""
    batch, rows = state.anchor.shape[0], drafter.block_size
    report = Report(
        cycles=jnp.int32(0),
        tokens=jnp.zeros((max_cycles, batch, rows), jnp.int32),
        num_committed=jnp.zeros((max_cycles, batch), jnp.int32),
        active=state.active,
    )

    def go_on(carry):
        _, report = carry
        return (report.cycles < max_cycles) & jnp.any(report.active)

    def step(carry):
        state, report = carry
        state, tokens, num_committed = cycle(target, drafter, state, rules=rules)
        i = report.cycles
        report = Report(
            cycles=i + 1,
            tokens=report.tokens.at[i].set(tokens),
            num_committed=report.num_committed.at[i].set(num_committed),
            active=state.active,
        )
        return state, report

    return jax.lax.while_loop(go_on, step, (state, report))


def _verify(
    proposal: Proposal,
    tree: trees.Tree | None,
    logits: jax.Array,
    positions: jax.Array,
    sampler: SequenceSampler,
) -> verify.Verdict:
    """Picks the rule that the proposal's form and the sampler ask for."""
    positions = jnp.broadcast_to(positions, logits.shape[:2])
    if proposal.probs is not None:
        if tree is not None:
            raise ValueError("rejection verification takes chains, not trees")
        return verify.rejection_chain(
            proposal.tokens, proposal.probs, logits, positions, sampler.params
        )
    sampled = sampler.sample(logits, positions)
    if tree is None:
        return verify.coupled_chain(proposal.tokens, sampled)
    return verify.coupled_tree(proposal.tokens, sampled, tree)


def _following_tokens(rows: jax.Array, verdict: verify.Verdict) -> jax.Array:
    """The accepted drafts, then the bonus token: int32 [B, R], of which num_accepted + 1 count."""
    path = verdict.path
    along = rows if path is None else jnp.take_along_axis(rows, path, axis=1)
    following = jnp.roll(along, -1, axis=1)
    is_bonus = jnp.arange(rows.shape[1]) == verdict.num_accepted[:, None]
    return jnp.where(is_bonus, verdict.next_token[:, None], following)


def _commit(
    state: DecodeState, committed: jax.Array, count: jax.Array, rules: Rules
) -> tuple[jax.Array, jax.Array]:
    """Cuts what was accepted at each sequence's limit and at its first stop token.

    Returns:
      num_committed int32 [B], active bool [B] after the cycle.
    """
    count = jnp.minimum(count, state.limit - state.length)
    stops = rules.is_stop(committed) & (jnp.arange(committed.shape[1]) < count[:, None])
    stopped = stops.any(axis=1)
    count = jnp.where(stopped, jnp.argmax(stops, axis=1).astype(jnp.int32) + 1, count)
    count = jnp.where(state.active, count, 0)
    return count, state.active & ~stopped & (state.length + count < state.limit)
