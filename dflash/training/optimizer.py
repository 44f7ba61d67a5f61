"""From the config's optimizer group to optax.

A batch that is worked through in pieces is summed up inside one step, not across steps: the state
between steps then holds no half-done sums, and a continued run repeats exactly.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from dflash.config.loss_schema import OptimizerConfig

Schedule = Callable[[jax.Array], jax.Array]

# Muon's updates as large as AdamW's, so that one learning rate suits both.
# Source: arXiv 2502.16982.
_MUON_RMS = 0.2
# Parameters that map tokens to vectors and back: Muon leaves them to AdamW.
_EMBEDDING, _HEAD = "embedding", "lm_head"
_MUON, _ADAMW = "muon", "adamw"


def make_optimizer(config: OptimizerConfig, total_steps: int) -> optax.GradientTransformation:
    """Clipping, then the update rule with its schedule.

    Parameters are told apart by their paths and shapes: vectors (norms) and embeddings do not
    decay, matrices other than embeddings and heads are what Muon orthogonalises.

    Args:
      config: the run's optimizer group.
      total_steps: of the run.
    """
    schedule = make_schedule(config, total_steps)
    update = optax.adamw(
        schedule,
        b1=config.beta1,
        b2=config.beta2,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        mask=decays,
    )
    if config.name == "muon":
        muon = contrib.muon(
            schedule,
            beta=config.momentum,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            consistent_rms=_MUON_RMS,
        )
        update = optax.partition({_MUON: muon, _ADAMW: update}, _rules)
    if not config.clip_norm:
        return update
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), update)


def make_schedule(config: OptimizerConfig, total_steps: int) -> Schedule:
    """The learning rate of each step, float32 [] from an int32 [].

    It rises in a straight line over the first steps, the very first of which already learns, and
    falls to final_fraction of its peak at `total_steps`.

    Args:
      config: the run's optimizer group.
      total_steps: of the run.
    """
    peak, final = config.learning_rate, config.learning_rate * config.final_fraction
    warmup = round(config.warmup_fraction * total_steps)
    rest = max(total_steps - warmup, 1)

    def schedule(step):
        step = jnp.asarray(step, jnp.float32)
        done = jnp.clip((step - warmup) / rest, 0.0, 1.0)
        left = {
            "cosine": lambda: (1 + jnp.cos(jnp.pi * done)) / 2,
            "linear": lambda: 1 - done,
            "constant": lambda: jnp.ones(()),
        }[config.schedule]()
        rate = final + (peak - final) * left
        return jnp.where(step < warmup, peak * (step + 1) / max(warmup, 1), rate)

    return schedule


def decays(params: Any) -> Any:
    """Which parameters weight decay applies to: a tree of bools for a tree of arrays."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf.ndim > 1 and _EMBEDDING not in _names(path), params
    )


def _rules(params: Any) -> Any:
    """Which of Muon and AdamW each parameter follows."""

    def choose(path, leaf):
        matrix = leaf.ndim == 2 and not {_EMBEDDING, _HEAD}.intersection(_names(path))
        return _MUON if matrix else _ADAMW

    return jax.tree_util.tree_map_with_path(choose, params)


def _names(path: tuple) -> list[str]:
    return [str(getattr(key, "key", getattr(key, "name", key))) for key in path]
