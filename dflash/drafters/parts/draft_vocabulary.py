"""Draft vocabulary: the Q of a target's V tokens that a drafter can draft.

With fewer tokens, a cycle reads fewer columns of the output head. Checkpoints store the vocabulary
as two tables, under the names of EAGLE-3 (SafeAILab/EAGLE): `d2t`, int [Q], where draft token i is
the target's token i + d2t[i]; and `t2d`, bool [V], which marks the tokens that can be drafted.
A `Shortlist` is a draft vocabulary of a single draft, with other tokens at each position.
"""

import dataclasses
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from dflash import errors
from dflash.layers.losses import TokenScores
from dflash.parallel import parameters
from dflash.parallel.parameters import Buffer
from dflash.parallel.sharding import Sharding


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftVocabulary:
    """The Q of the target's V tokens that a drafter may draft.

    Attributes:
      target_ids: Target token of each draft token, int32 [Q].
      draft_ids: Draft token of each target token, int32 [V]; Q if it cannot be drafted.
    """

    target_ids: jax.Array
    draft_ids: jax.Array

    @classmethod
    def of(cls, d2t: jax.Array, vocab_size: int) -> "DraftVocabulary":
        """Builds the vocabulary from the table `d2t` int32 [Q], for a target of V tokens."""
        size = d2t.shape[0]
        ids = jnp.arange(size)
        target_ids = ids + d2t
        blank = jnp.full((vocab_size,), size, jnp.int32)
        return cls(target_ids, blank.at[target_ids].set(ids))

    @property
    def size(self) -> int:
        """Size of the draft vocabulary, Q."""
        return self.target_ids.shape[0]

    @property
    def target_size(self) -> int:
        """Size of the target's vocabulary, V."""
        return self.draft_ids.shape[0]

    def name(self, tokens: jax.Array) -> jax.Array:
        """Returns the target tokens of draft tokens int32 [...]."""
        return self.target_ids[tokens]

    def pick(self, values: jax.Array) -> jax.Array:
        """Selects the draft tokens' values [..., Q] from the target tokens' values [..., V]."""
        return values[..., self.target_ids]

    def spread(self, values: jax.Array, fill: float) -> jax.Array:
        """Scatters values [..., Q] to target tokens [..., V], with `fill` at all others."""
        wide = jnp.take(values, self.draft_ids, axis=-1, mode="clip")
        return jnp.where(self.draft_ids < self.size, wide, fill)

    def without_unknown(self, scores: TokenScores, labels: jax.Array) -> TokenScores:
        """Masks the scores of labels that cannot be drafted: no cost, infinite nll, not correct.

        Args:
          scores: Scores of `labels`; arbitrary where the label is Q.
          labels: Draft tokens, int32 in the shape of the scores; Q for tokens that cannot be
            drafted.
        """
        known = labels < self.size
        return TokenScores(
            objective=jnp.where(known, scores.objective, 0),
            nll=jnp.where(known, scores.nll, jnp.inf),
            correct=scores.correct & known,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shortlist:
    """Draft vocabulary of k tokens per position, which a drafter chooses during decoding.

    Several drafts of one position, T, may share its tokens.

    Attributes:
      target_ids: Target tokens, int32 [B, T or 1, k]; distinct within a position.
      target_size: Size of the target's vocabulary, V.
    """

    target_ids: jax.Array
    target_size: int = dataclasses.field(metadata={"static": True})

    def name(self, tokens: jax.Array) -> jax.Array:
        """Returns the target tokens of draft tokens int32 [B, T] or [B, T, n]."""
        index = tokens.reshape(*self.target_ids.shape[:2], -1)
        return jnp.take_along_axis(self.target_ids, index, axis=-1).reshape(tokens.shape)

    def pick(self, values: jax.Array) -> jax.Array:
        """Selects the draft tokens' values [B, T or 1, k] from all tokens' [B, T or 1, V]."""
        return jnp.take_along_axis(values, self.target_ids, axis=-1)

    def spread(self, values: jax.Array, fill: float) -> jax.Array:
        """Scatters values [B, T, k] to target tokens [B, T, V], with `fill` at all others."""
        wide = jnp.full((*values.shape[:2], self.target_size), fill, values.dtype)
        ids = jnp.broadcast_to(self.target_ids, values.shape)
        return jnp.put_along_axis(wide, ids, values, axis=-1, inplace=False)


# Subset of the target's tokens that a drafter draws from.
DraftTokens = DraftVocabulary | Shortlist


def declare(size: int, vocab_size: int, sharding: Sharding) -> tuple[Buffer, Buffer]:
    """Declares the tables `d2t` and `t2d`, which start with the first `size` tokens."""
    d2t = parameters.declare_buffer(
        (size,), (None,), dtype=jnp.int32, stored_dtype="int64", sharding=sharding
    )
    t2d = parameters.declare_buffer(
        (vocab_size,), (None,), dtype=jnp.bool_, stored_dtype="bool", ones=size, sharding=sharding
    )
    return d2t, t2d


def choose(size: int, count_tokens: Callable[[], np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the tables `d2t` and `t2d` of the tokens that are labels most often.

    Args:
      size: Size of the draft vocabulary, Q.
      count_tokens: Function () -> counts int64 [V]; see `Drafter.prepare_training`.
    """
    counts = count_tokens()
    frequent = np.argsort(-counts, kind="stable")[:size]
    chosen = np.isin(np.arange(counts.size), frequent)
    return {"d2t": np.flatnonzero(chosen) - np.arange(size), "t2d": chosen}


def check(d2t: np.ndarray, vocab_size: int, directory: pathlib.Path) -> None:
    """Raises CheckpointError if `d2t` has a token twice, or one that the target lacks."""
    ids = np.arange(d2t.size) + np.asarray(d2t, np.int64)
    order = np.argsort(ids, kind="stable")
    wrong = (ids < 0) | (ids >= vocab_size)
    wrong[order[1:]] |= ids[order[1:]] == ids[order[:-1]]
    if wrong.any():
        draft = int(np.argmax(wrong))
        raise errors.CheckpointError(
            f"{directory}: d2t[{draft}]: draft token {draft} maps to token {ids[draft]}; expected "
            f"distinct tokens in [0, {vocab_size})"
        )
