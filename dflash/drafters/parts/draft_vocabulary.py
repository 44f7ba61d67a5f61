"""A draft vocabulary: the Q of a target's V tokens that a drafter can draft.

With fewer tokens, a cycle reads fewer columns of an output head. The choice is two tables of the
drafter's checkpoint, named as EAGLE-3 (SafeAILab/EAGLE) has them: `d2t`, int [Q]: draft token i is
the target's token i + d2t[i]; `t2d`, bool [V]: which of the target's tokens can be drafted.
A `Shortlist` is the same for a single draft, with other tokens at each position.
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
    """Which Q of the target's V tokens a drafter may draft.

    Attributes:
      target_ids: int32 [Q]; of each draft token.
      draft_ids: int32 [V]; of each target token, Q where it cannot be drafted.
    """

    target_ids: jax.Array
    draft_ids: jax.Array

    @classmethod
    def of(cls, d2t: jax.Array, vocab_size: int) -> "DraftVocabulary":
        """As the table `d2t` int32 [Q] has it, for a target of `vocab_size` tokens."""
        size = d2t.shape[0]
        ids = jnp.arange(size)
        target_ids = ids + d2t
        blank = jnp.full((vocab_size,), size, jnp.int32)
        return cls(target_ids, blank.at[target_ids].set(ids))

    @property
    def size(self) -> int:
        """Q."""
        return self.target_ids.shape[0]

    @property
    def target_size(self) -> int:
        """V."""
        return self.draft_ids.shape[0]

    def name(self, tokens: jax.Array) -> jax.Array:
        """Draft tokens int32 [...] -> the target's."""
        return self.target_ids[tokens]

    def pick(self, values: jax.Array) -> jax.Array:
        """Of the target's tokens [..., V] -> of draft tokens [..., Q]."""
        return values[..., self.target_ids]

    def spread(self, values: jax.Array, fill: float) -> jax.Array:
        """Of draft tokens [..., Q] -> of the target's [..., V]; `fill` where not drafted."""
        wide = jnp.take(values, self.draft_ids, axis=-1, mode="clip")
        return jnp.where(self.draft_ids < self.size, wide, fill)

    def without_unknown(self, scores: TokenScores, labels: jax.Array) -> TokenScores:
        """Scores of draft labels, where labels that cannot be drafted cost nothing and are wrong.

        Args:
          scores: of `labels`, which mean nothing where these are Q.
          labels: int32, of the scores' shape; draft tokens, Q where there is none.
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
    """A draft vocabulary of k tokens for each position, as a drafter chooses them in decoding.

    Attributes:
      target_ids: int32 [B, T, k]; distinct within a position.
      target_size: V.
    """

    target_ids: jax.Array
    target_size: int = dataclasses.field(metadata={"static": True})

    def name(self, tokens: jax.Array) -> jax.Array:
        """Draft tokens int32 [B, T] or [B, T, n] -> the target's."""
        index = tokens.reshape(*self.target_ids.shape[:2], -1)
        return jnp.take_along_axis(self.target_ids, index, axis=-1).reshape(tokens.shape)

    def pick(self, values: jax.Array) -> jax.Array:
        """Of the target's tokens [B, T, V] -> of draft tokens [B, T, k]."""
        return jnp.take_along_axis(values, self.target_ids, axis=-1)

    def spread(self, values: jax.Array, fill: float) -> jax.Array:
        """Of draft tokens [B, T, k] -> of the target's [B, T, V]; `fill` where not drafted."""
        wide = jnp.full((*values.shape[:2], self.target_size), fill, values.dtype)
        return jnp.put_along_axis(wide, self.target_ids, values, axis=-1, inplace=False)


# The tokens that a drafter draws among, where these are not all of the target's.
DraftTokens = DraftVocabulary | Shortlist


def declare(size: int, vocab_size: int, sharding: Sharding) -> tuple[Buffer, Buffer]:
    """The abstract tables `d2t` and `t2d`; without a checkpoint, of the first `size` tokens."""
    d2t = parameters.declare_buffer(
        (size,), (None,), dtype=jnp.int32, stored_dtype="int64", sharding=sharding
    )
    t2d = parameters.declare_buffer(
        (vocab_size,), (None,), dtype=jnp.bool_, stored_dtype="bool", ones=size, sharding=sharding
    )
    return d2t, t2d


def choose(size: int, count_tokens: Callable[[], np.ndarray]) -> dict[str, np.ndarray]:
    """The tables, by name, of the `size` tokens that are labels most often.

    Args:
      size: Q.
      count_tokens: see `Drafter.prepare_training`.
    """
    counts = count_tokens()
    frequent = np.argsort(-counts, kind="stable")[:size]
    chosen = np.isin(np.arange(counts.size), frequent)
    return {"d2t": np.flatnonzero(chosen) - np.arange(size), "t2d": chosen}


def check(d2t: np.ndarray, vocab_size: int, directory: pathlib.Path) -> None:
    """Checks a table `d2t` that was loaded from a checkpoint.

    Raises:
      CheckpointError: it names a token that the target does not have, or one token twice.
    """
    ids = np.arange(d2t.size) + np.asarray(d2t, np.int64)
    order = np.argsort(ids, kind="stable")
    wrong = (ids < 0) | (ids >= vocab_size)
    wrong[order[1:]] |= ids[order[1:]] == ids[order[:-1]]
    if wrong.any():
        draft = int(np.argmax(wrong))
        raise errors.CheckpointError(
            f"{directory}: d2t[{draft}]: draft token {draft} becomes token {ids[draft]}; "
            f"expected different tokens of the target's {vocab_size}"
        )
