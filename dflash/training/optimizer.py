"""Optax optimizer and learning-rate schedule of the config's optimizer group.

Gradients of microbatches are accumulated inside one step, not by optax across steps. The state then
holds no partial sums, and a resumed run repeats exactly.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dflash import errors
from dflash.config import registry
from dflash.config.train_schema import OptimizerConfig

Schedule = Callable[[jax.Array], jax.Array]

# Scale Muon's updates to the RMS of AdamW's updates, so that one learning rate suits both.
# Source: arXiv 2502.16982.
_MUON_RMS = 0.2
# Coefficients and number of the quintic Newton-Schulz iterations.
# Source: Keller Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024.
_LINEAR, _CUBIC, _QUINTIC = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5
# AdamW, not Muon, updates the parameters that map tokens to vectors and back.
_EMBEDDING, _HEAD = "embedding", "lm_head"
_MUON, _ADAMW = "muon", "adamw"


def make_optimizer(config: OptimizerConfig, total_steps: int) -> optax.GradientTransformation:
    """Returns the update rule with its schedule, after gradient clipping.

    Vectors (norms) and embeddings have no weight decay. Muon updates the matrices other than
    embeddings and heads. `init` raises ConfigError if `learning_rates` names an unknown part.
    """
    own_rates = config.learning_rates
    if own_rates:  # Updates are proportional to the rate, so scale those of a rate of 1.
        rate, config = config.learning_rate, dataclasses.replace(config, learning_rate=1.0)
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
        muon = optax.chain(
            optax.trace(config.momentum, nesterov=True),
            optax.stateless_with_tree_map(lambda x, _: _orthogonalized(x, config.epsilon)),
            optax.add_decayed_weights(config.weight_decay),
            optax.scale_by_learning_rate(schedule),
        )
        update = optax.partition({_MUON: muon, _ADAMW: update}, _rules)
    if own_rates:
        update = optax.chain(update, _scale({"": rate, **own_rates}))
    if not config.clip_norm:
        return update
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), update)


def _scale(rates: Mapping[str, float]) -> optax.GradientTransformation:
    """Scales updates by the rate of the longest beginning of their parameter's name."""

    def find(path) -> list[str]:
        """Returns the beginnings of a parameter's name that have a rate, longest last."""
        name = ".".join(_names(path))
        return sorted(
            (part for part in rates if f"{name}.".startswith(part and f"{part}.")), key=len
        )

    def init(params):
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        unknown = set(rates).difference(*map(find, paths))
        if unknown:
            parts = sorted({_names(path)[0] for path in paths})
            raise errors.ConfigError(
                f"optimizer.learning_rates: no parameter's name begins with {min(unknown)!r}"
                f"{registry.suggest(min(unknown), parts)}"
            )
        return optax.EmptyState()

    def update(updates, state, params=None):
        scaled = jax.tree_util.tree_map_with_path(
            lambda path, x: rates[find(path)[-1]] * x, updates
        )
        return scaled, state

    return optax.GradientTransformation(init, update)


def make_schedule(config: OptimizerConfig, total_steps: int) -> Schedule:
    """Returns the learning-rate schedule, which maps a step, int32 [], to a rate, float32 [].

    The rate rises linearly during warm-up, from more than zero at step 0, and then falls to
    `final_fraction` of its peak at `total_steps`.
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


def _orthogonalized(x: jax.Array, epsilon: float) -> jax.Array:
    """Moves all singular values of a matrix near 1, and scales it to AdamW's RMS.

    The products are of bfloat16 with float32 sums, which the iterations tolerate. In place of
    optax's loop on float32, this takes a third of the processor time.

    Args:
      x: Momentum, float32 [M, N].
    """
    tall = x.shape[0] > x.shape[1]
    x = x / (jnp.linalg.norm(x) + epsilon)
    for _ in range(_ITERATIONS):
        gram = _product(x.T, x) if tall else _product(x, x.T)
        factor = _CUBIC * gram + _QUINTIC * _product(gram, gram)
        x = _LINEAR * x + (_product(x, factor) if tall else _product(factor, x))
    return x * (_MUON_RMS * max(x.shape) ** 0.5)


def _product(x: jax.Array, y: jax.Array) -> jax.Array:
    narrow = jnp.bfloat16
    return jnp.dot(x.astype(narrow), y.astype(narrow), preferred_element_type=jnp.float32)


def _rules(params: Any) -> Any:
    """Returns a tree of labels, the update rule of each parameter."""

    def choose(path, leaf):
        matrix = leaf.ndim == 2 and not {_EMBEDDING, _HEAD}.intersection(_names(path))
        return _MUON if matrix else _ADAMW

    return jax.tree_util.tree_map_with_path(choose, params)


def _names(path: tuple) -> list[str]:
    return [str(getattr(key, "key", getattr(key, "name", key))) for key in path]
