"""Orders and results that travel between an engine that prefills and one that decodes."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from dflash import errors
from dflash.inference.engine import Engine
from dflash.inference.request import Request, TokenLogprobs
from dflash.models.decoder import Decoder


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PromptRows:
    """Everything that the rows of one prompt leave behind on the device.

    Attributes:
      layers: The target's part; see `PagedCache.read_sequence`.
      drafter: The drafter's state of the prompt, as in a prefill slot.
    """

    layers: Any
    drafter: Any


@dataclasses.dataclass(frozen=True)
class PrefillOrder:
    """Order to prefill a sequence.

    Attributes:
      id: Number of the order, unique among those of the ordering engine.
      request: Request without its grammar.
      output_ids: Output so far, of a preempted request; empty for a new one.
      allowed: Mask of the tokens that may begin the output, int32 [ceil(V / 32)], if the request
        constrains its logits; None for an unconstrained request.
    """

    id: int
    request: Request
    output_ids: tuple[int, ...]
    allowed: np.ndarray | None


@dataclasses.dataclass(frozen=True)
class Prefilled:
    """Result of an order.

    Attributes:
      id: Number of the order.
      anchor: First token of a new request, negative if its logits are not finite.
      logprobs: Log-probabilities of this token, if the request asks for them.
      cached_tokens: Tokens that were found in the prefix cache.
      queued_ms: Time from the order's arrival to its first chunk, in milliseconds.
      prefill_ms: Time of its chunks, in milliseconds.
      rows: Rows of the prompt, on a device or as numpy arrays; None after an error.
      error: Error that ends the request; None if it was prefilled.
      may_retry: The same order may succeed later.
    """

    id: int
    anchor: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    cached_tokens: int = 0
    queued_ms: float = 0.0
    prefill_ms: float = 0.0
    rows: PromptRows | None = None
    error: str | None = None
    may_retry: bool = False


class Prefiller(Protocol):
    """Another engine, in this process or another one, that prefills what it is ordered to."""

    def order(self, order: PrefillOrder) -> None:
        """Appends an order; does not block."""

    def cancel(self, id: int) -> None:
        """Drops an order; its result may arrive nevertheless."""

    def results(self, wait_s: float) -> Sequence[Prefilled]:
        """Returns the results that have arrived; waits up to `wait_s` seconds for the first one."""


def check_target(target: Decoder) -> None:
    """Raises if the prompts of a target cannot travel.

    Raises:
      ConfigError: The target keeps recurrent state, whose layout depends on the mesh, or its mesh
        has several data replicas or devices of several processes.
    """
    if target.has_recurrent_state:
        raise errors.ConfigError(
            f"serve.role: not supported for {type(target).__name__}, which keeps recurrent state; "
            "leave it at both"
        )
    replicas = target.sharding.size("pages")
    if replicas > 1:
        raise errors.ConfigError(
            f"serve.role: supported with one data replica, but the mesh has {replicas}; set "
            "mesh.data=1 and start one server for each replica"
        )
    if jax.process_count() > 1:
        raise errors.ConfigError(
            "serve.role: supported with one process for each role; start each server by itself"
        )


def facts_of(engine: Engine) -> dict[str, Any]:
    """Returns facts about an engine that must hold of another one to exchange rows, by key."""
    layout, rows = engine.layout, abstract_rows(engine)
    layers = [
        (one.dtype.name, one.shape[0], *one.shape[2:]) for one in jax.tree.leaves(rows.layers)
    ]
    drafter = [(one.dtype.name, one.ndim) for one in jax.tree.leaves(rows.drafter)]
    return {
        "decode.page_size": layout.page_size,
        "decode.max_length": layout.max_length,
        "rows of the target": repr(layers),
        "state of the drafter": repr(drafter),
    }


def check_facts(own: Mapping[str, Any], other: Any, where: str) -> None:
    """Raises if facts of another process differ from those of this one.

    Args:
      own: Facts about this process.
      other: Facts that the other process has sent.
      where: Name of the other process.
    Raises:
      UserError: Names the first fact that differs, with both values.
    """
    other = other if isinstance(other, dict) else {}
    for key in {**own, **other}:
        here, there = (errors.shorten(repr(facts.get(key)), 80) for facts in (own, other))
        if own.get(key) != other.get(key):
            raise errors.UserError(f"{key}: {there} {where}, {here} here; start both servers alike")


def abstract_rows(engine: Engine) -> PromptRows:
    """Returns the shapes, dtypes and shardings of the rows that an engine takes."""
    return PromptRows(engine.shapes.sequence(), engine.shapes.prefill_state())


def first_pages(layers: Any, count: int) -> Any:
    """Returns the layers of a sequence without the pages that its prompt does not reach.

    Up to an eighth more are kept, so that few programs are compiled.

    Args:
      layers: The target's part of `PromptRows`, a pytree of [H, M, …].
      count: Number of pages of the prompt, at least 1.
    """
    step = max(1, (1 << count.bit_length()) // 16)
    kept = -(-count // step) * step
    return jax.tree.map(lambda array: array[:, :kept], layers)


def placed(rows: PromptRows, engine: Engine) -> PromptRows:
    """Returns the rows of another engine, or of its mesh, on the mesh of an engine.

    Arrays that are shorter than this engine's end in zeros, and those that are longer lose their
    end, which belongs to positions that no sequence of this engine has.
    """

    def place(array: Any, here: jax.ShapeDtypeStruct) -> jax.Array:
        if array.shape != here.shape:
            array = _fitted(np.asarray(array), here.shape)
        return jax.device_put(array, here.sharding)

    return jax.tree.map(place, rows, abstract_rows(engine))


def _fitted(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    common = tuple(slice(0, min(pair)) for pair in zip(array.shape, shape, strict=True))
    fitted = np.zeros(shape, array.dtype)
    fitted[common] = array[common]
    return fitted
