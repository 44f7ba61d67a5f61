"""Optax optimizer and learning-rate schedule of the config's optimizer group.

Gradients of microbatches are accumulated inside one step, not by optax across steps. The state then
holds no partial sums, and a resumed run repeats exactly.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from dflash.config.loss_schema import OptimizerConfig

Schedule = Callable[[jax.Array], jax.Array]

# Scale Muon's updates to the RMS of AdamW's updates, so that one learning rate suits both.
# Source: arXiv 2502.16982.
_MUON_RMS = 0.2
# AdamW, not Muon, updates the parameters that map tokens to vectors and back.
_EMBEDDING, _HEAD = "embedding", "lm_head"
_MUON, _ADAMW = "muon", "adamw"


def make_optimizer(config: OptimizerConfig, total_steps: int) -> optax.GradientTransformation:
    """Returns the update rule with its schedule, after gradient clipping.

    Vectors (norms) and embeddings have no weight decay. Muon updates the matrices other than
    embeddings and heads.

    Args:
      config: The run's optimizer group.
      total_steps: Total optimizer steps.
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
    """Returns the learning-rate schedule, which maps a step, int32 [], to a rate, float32 [].

    The rate rises linearly during warm-up, from more than zero at step 0, and then falls to
    `final_fraction` of its peak at `total_steps`.

    Args:
      config: The run's optimizer group.
      total_steps: Total optimizer steps.
    """
    peak, final = config.learning_rate, config.learning_rate * config.final_fraction
    warmup = round(config.warmup_fraction * total_steps)
    decay_steps = max(total_steps - warmup, 1)

    def schedule(step):
        step = jnp.asarray(step, jnp.float32)
        progress = jnp.clip((step - warmup) / decay_steps, 0.0, 1.0)
        remaining = {
            "cosine": lambda: (1 + jnp.cos(jnp.pi * progress)) / 2,
            "linear": lambda: 1 - progress,
            "constant": lambda: jnp.ones(()),
        }[config.schedule]()
        rate = final + (peak - final) * remaining
        return jnp.where(step < warmup, peak * (step + 1) / max(warmup, 1), rate)

    return schedule


def decays(params: Any) -> Any:
    """Returns a tree of bools, True for parameters with weight decay."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf.ndim > 1 and _EMBEDDING not in _names(path), params
    )


def _rules(params: Any) -> Any:
    """Returns a tree of labels, the update rule of each parameter."""

    def choose(path, leaf):
        matrix = leaf.ndim == 2 and not {_EMBEDDING, _HEAD}.intersection(_names(path))
        return _MUON if matrix else _ADAMW

    return jax.tree_util.tree_map_with_path(choose, params)


def _names(path: tuple) -> list[str]:
    return [str(getattr(key, "key", getattr(key, "name", key))) for key in path]
