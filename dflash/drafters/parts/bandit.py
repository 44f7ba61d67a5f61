"""Parts of a bandit: what was tried, how often it was accepted, and when to try something else.

Counts fade, so that rates follow a text that changes. The rate of something that was hardly tried
is about its prior. There are two ways to try again what seems worse than the best. Where a trial
costs time of its own, `Trial` waits until a small fraction of what the best brings covers its
expected loss. Where it costs acceptance alone, the highest of the `hopeful_rates` is taken.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

TRIALS = 0.01  # Largest fraction of the whole that trials may cost; see `Trial`.
ERRORS = 0.7  # Number of standard errors by which hopeful rates are raised.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Counts:
    """Numbers of times that K things were tried and accepted, with exponential decay.

    Attributes:
      tried: float32 [..., K].
      accepted: float32 [..., K].
    """

    tried: jax.Array
    accepted: jax.Array

    def rates(self, prior: ArrayLike, weight: float) -> jax.Array:
        """Returns rates of acceptance, [..., K], with a prior that counts as `weight` trials."""
        return (self.accepted + weight * prior) / (self.tried + weight)

    def hopeful_rates(self, prior: ArrayLike, weight: float) -> jax.Array:
        """Returns `rates` raised by about their standard error.

        The highest of them is that of the best thing, or of one that was hardly tried, or not for
        long. Something whose rate is lower by a fraction d is then tried in about a fraction
        1 / (1 + d · sqrt(n))² of the cases, where n is the number of accepted ones that are
        remembered. So trials cost little whether d is small or large.
        """
        return self.rates(prior, weight) * (1 + ERRORS / jnp.sqrt(1 + self.accepted))

    def after(self, news: "Counts", fade: ArrayLike) -> "Counts":
        """Returns the counts with new ones added, after the old ones have faded to a fraction."""
        return jax.tree.map(lambda old, new: old * fade + new, self, news)

    def forget(self, slot: jax.Array) -> "Counts":
        """Clears the counts of one sequence."""
        return jax.tree.map(lambda x: x.at[slot].set(0), self)

    def sum(self) -> "Counts":
        """Returns the counts of all sequences together."""
        return jax.tree.map(lambda x: x.sum(axis=0), self)

    def capped(self, most: float) -> "Counts":
        """Returns the same rates from at most `most` trials of anything."""
        scale = most / jnp.maximum(self.tried.max(), most)
        return jax.tree.map(lambda x: x * scale, self)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Trial:
    """The best choice, and the one to try in its place when its expected loss is earned.

    Attributes:
      best: int32 [...]; the choice that is expected to bring the most.
      other: int32 [...]; the choice to try; the best one if there is none.
      loss: float32 [...]; what a trial is expected to cost.
      credit: float32 [...]; what trials may cost at present.
    """

    best: jax.Array
    other: jax.Array
    loss: jax.Array
    credit: jax.Array

    @property
    def index(self) -> jax.Array:
        """The choice to take now, int32 [...]."""
        return jnp.where(self.credit >= self.loss, self.other, self.best)

    def between(self, best: jax.Array, other: jax.Array, loss: jax.Array) -> "Trial":
        """Returns the trial between two choices, with the credit of this one."""
        best, other = best.astype(jnp.int32), other.astype(jnp.int32)
        return Trial(best, other, jnp.maximum(loss, 0), self.credit).earning(0.0)

    def earning(self, amount: ArrayLike) -> "Trial":
        """Returns the trial after an amount was earned, or lost if it is negative.

        Credit is capped at one trial, so that saved credit causes no burst of trials. So is debt:
        what a trial cost beyond its expected loss is bad luck, of which the rates tell.
        """
        credit = jnp.clip(self.credit + amount, -self.loss, self.loss)
        return dataclasses.replace(self, credit=credit)
