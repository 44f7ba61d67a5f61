"""Replacement of a target's weights in place, from the tree of a trainer.

A tree is checked as a whole before anything is written: names, shapes, and that every number is
finite. Each new parameter is then written into the buffer of the old one, so that the weights
never exist twice. Programs are not affected, since shapes, dtypes and shardings stay the same.
Cached keys and values belong to the old weights, so the holder of a cache must drop it.
"""

import dataclasses
import functools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflash import errors
from dflash.checkpoints import files, foreign_trees
from dflash.checkpoints.namings.origin import Origin
from dflash.inference import update_plan
from dflash.inference.update_plan import Plan
from dflash.kernels import weights_cpu
from dflash.models.decoder import Decoder

# Plan of each target's last update.
_PLANS: weakref.WeakKeyDictionary[Decoder, Plan] = weakref.WeakKeyDictionary()


def update(target: Decoder, tree: Any, *, lora_alpha: float | None = None) -> None:
    """Replaces the weights of a target in place; every engine over it decodes with the new ones.

    Args:
      tree: Weights under the names of Hugging Face, Tunix or MaxText; see `foreign_trees`. Its
        arrays may be on other devices, are copied, and stay valid.
      lora_alpha: Numerator of the scale of LoRA parameters in the tree, which are merged.
    Raises:
      CheckpointError: An array is missing, unknown, of another shape, or not finite. The old
        weights are then unchanged.
    """
    tree = foreign_trees.parameters_of(tree)
    form, leaves = update_plan.form_of(tree, lora_alpha)
    plan = _PLANS.get(target)
    if plan is None or not plan.fits(target, form):
        plan = _PLANS[target] = update_plan.make_plan(target, tree, lora_alpha)
    arrays = [leaves[place] for place in plan.places]
    _check_alive(plan.names, arrays)
    # A trainer may forbid transfers around its own work, as Tunix does.
    with jax.transfer_guard("allow"):
        _check_copies(plan, leaves)
        if plan.write is not None:
            on_one_cpu = update_plan.is_one_cpu(plan.entries[0].places[0])
            if not _are_finite(arrays, on_one_cpu=on_one_cpu):
                _check_finite_apart(plan.names, arrays)
            _write_together(plan, arrays)
        else:
            _check_finite_apart(plan.names, arrays)
            _write_apart(plan, dict(zip(plan.names, arrays, strict=True)))


# --- checks of arrays ---------------------------------------------------------------------------


def _check_alive(names: Sequence[str], arrays: Sequence[Any]) -> None:
    for name, array in zip(names, arrays, strict=True):
        if getattr(array, "is_deleted", bool)():
            raise errors.CheckpointError(
                f"weights: tensor {name!r} was donated or deleted; give the trainer's current "
                "arrays"
            )


def _check_copies(plan: Plan, leaves: Sequence[Any]) -> None:
    """Raises CheckpointError if a tied head, which a tree may hold too, is not the embedding."""
    for (copy, place), (original, other) in plan.copies:
        array, expected = leaves[place], leaves[other]
        there = jax.device_put(expected, getattr(array, "sharding", None))
        if array is not expected and not jnp.array_equal(array, there, equal_nan=True):
            raise errors.CheckpointError(
                f"weights: {copy!r} differs from {original!r}, but the target ties them; its "
                "weights stay as they were"
            )


def _check_finite_apart(names: Sequence[str], arrays: Sequence[Any]) -> None:
    flags = [_are_finite([array]) for array in arrays]
    wrong = [name for name, flag in zip(names, flags, strict=True) if not flag]
    if wrong:
        raise errors.CheckpointError(
            f"weights: {len(wrong)} tensors hold NaN or infinite numbers: "
            f"{files.quote_some(wrong)}; the target's weights stay as they were"
        )


@functools.partial(jax.jit, static_argnames="on_one_cpu")
def _are_finite(arrays: Sequence[jax.Array], *, on_one_cpu: bool = False) -> jax.Array:
    """Returns whether all numbers are finite, faster than by a test of each.

    The first arrays are read last: they are then still in a CPU's cache when they are written.
    """
    flags, rows = [], []
    for array in reversed(arrays):
        if on_one_cpu and weights_cpu.is_supported(array):
            flags.append(weights_cpu.is_finite(array))
        else:
            rows.append(_row_products(array).reshape(-1).astype(jnp.float32))
    if rows:
        flags.append(jnp.isfinite(jnp.concatenate(rows)).all())
    return jnp.stack(flags).all()


def _row_products(array: jax.Array) -> jax.Array:
    """Returns numbers of which one is not finite if one of the array is not.

    A NaN or an infinity becomes NaN in a product with zeros.
    """
    if array.ndim < 2:
        return array
    if array.dtype != jnp.float32:  # A CPU would widen a copy for the product.
        return jnp.abs(array).max()
    return jnp.tensordot(array, jnp.zeros(array.shape[-1]), axes=1)


# --- writing ------------------------------------------------------------------------------------


def _write_together(plan: Plan, arrays: Sequence[jax.Array]) -> None:
    """Writes all parameters by one program, which donates the old ones."""
    variables = plan.variables.values()
    new = plan.write([variable.get_raw_value() for variable in variables], arrays)
    for variable, value in zip(variables, new, strict=True):
        variable.set_raw_value(value)


def _write_apart(plan: Plan, flat: Mapping[str, Any]) -> None:
    """Computes each parameter on the devices of its arrays, and moves it to those of the target."""
    for entry in plan.entries:
        parts = [
            # Layers of equal shapes share one program, whatever their names and numbers.
            _compute(
                dataclasses.replace(part, names=(), layer=None),
                entry.dtype,
                [flat[name] for name in part.names],
                None if part.layer is None else np.int32(part.layer),
            )
            for part in entry.parts
        ]
        for path in entry.paths:
            plan.variables[path].get_raw_value().delete()
        # An alias of the trainer's array would end with it.
        parts = [jax.device_put(part, entry.places[0], may_alias=False) for part in parts]
        for path, value in zip(entry.paths, entry.finish(parts), strict=True):
            plan.variables[path].set_raw_value(value)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _compute(
    origin: Origin, dtype: jnp.dtype, arrays: Sequence[jax.Array], layer: jax.Array | None
) -> jax.Array:
    return origin.compute(arrays, layer).astype(dtype)
