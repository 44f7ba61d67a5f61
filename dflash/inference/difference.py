"""First difference between two outputs of one request, and whether rounding explains it.

Programs of other shapes add in another order. Where the target scores two tokens nearly alike,
plain and drafted decoding may therefore take different ones, and whole outputs differ from there
on. A difference that rounding does not explain is a fault of the program. The scores come from one
further pass over the tokens that both outputs share.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash import errors
from dflash.config.schema import AUTO, DecodeConfig
from dflash.inference.logits import controls as logit_controls
from dflash.inference.logits import sampling
from dflash.inference.logits.controls import Controls
from dflash.inference.logits.sampling import SamplingParams
from dflash.inference.request import Request, RequestSampling
from dflash.layers.products import matmul_precision
from dflash.models.decoder import Decoder

# Units in the last place by which rounding may move the difference of two scores. In float32 a unit
# is so small that the sums of all layers move it by many: 8 were seen in a target of two layers.
_MOST_UNITS = {"bfloat16": 2.0, "float32": 64.0}

MOST_EXPLAINED = 8  # Differing outputs of a run whose first difference is looked for.


@dataclasses.dataclass(frozen=True)
class Difference:
    """First position at which a drafted output differs from the plain one.

    Attributes:
      position: Number of output tokens that are equal.
      tokens: Plain and drafted token there; None where an output has ended.
      gap: Difference of their scores, in nats: of logits after penalties and biases, and of the
        noise times the temperature; or how far a token lies beyond top_k, top_p or min_p. Infinite
        if an output has ended, or a token is excluded.
      unit: Unit in the last place of the larger score.
      precision: Dtype of the unit.
    """

    position: int
    tokens: tuple[int | None, int | None]
    gap: float
    unit: float
    precision: str

    @property
    def is_fault(self) -> bool:
        """Returns whether rounding does not explain the difference."""
        return self.gap > _MOST_UNITS[self.precision] * self.unit

    def __str__(self) -> str:
        plain, drafted = ("the end" if token is None else str(token) for token in self.tokens)
        where = f"token {self.position + 1} is {drafted}, plain decoding has {plain}"
        if not self.is_fault:
            return f"{where}: near tie ({self.gap / self.unit:.1f} ulp of {self.precision})"
        size = f": {self.gap:.2g} nats" if math.isfinite(self.gap) else ""
        return f"{where}: a fault{size}"


def lines(differences: Mapping[str, Difference]) -> list[str]:
    """Returns a line for each difference, by where it is."""
    return [f"{where}: {each}" for where, each in differences.items()]


def refuse_faults(differences: Mapping[str, Difference]) -> None:
    """Raises UnequalError if rounding does not explain one of the differences, by where it is."""
    for where, each in differences.items():
        if each.is_fault:
            raise errors.UnequalError(
                f"{where}: {each}; drafting must not change the output: please report it with the "
                "command, its config and the output of dflash doctor"
            )


def explain(
    target: Decoder,
    config: DecodeConfig,
    request: Request,
    plain: Sequence[int],
    drafted: Sequence[int],
) -> Difference | None:
    """Returns the first difference between two outputs of a request; None if they are equal.

    Args:
      target: Target with its weights.
      config: Config of both decodings, without a drafter.
      request: Request without a grammar.
    """
    if tuple(plain) == tuple(drafted):
        return None
    pairs = enumerate(zip(plain, drafted, strict=False))
    shorter = min(len(plain), len(drafted))
    position = next((i for i, (one, other) in pairs if one != other), shorter)
    one, other = (ids[position] if position < len(ids) else None for ids in (plain, drafted))
    precision = "float32" if target.dtype == jnp.float32 else "bfloat16"
    if config.kv_dtype != AUTO:
        precision = "bfloat16"  # A value that is rounded to 8 bits moves at least that much.
    gap, unit = math.inf, 1.0
    if one is not None and other is not None:
        logits, scores = _scores(target, config, request, plain[:position])
        beyond = max(_beyond_filters(logits, token, request.sampling) for token in (one, other))
        pair = (scores if beyond == 0 else logits)[[one, other]].tolist()
        gap, largest = beyond or abs(pair[0] - pair[1]), max(map(abs, pair))
        if math.isfinite(gap):
            epsilon = float(jnp.finfo(precision).eps)
            unit = epsilon * 2.0 ** math.floor(math.log2(max(largest, 1e-30)))
    return Difference(position, (one, other), gap, unit, precision)


def _beyond_filters(logits: np.ndarray, token: int, sampling: RequestSampling) -> float:
    """Returns how much likelier a token must be to be drawn, in nats; 0 if the filters keep it."""
    if logits[token] == -np.inf:
        return math.inf
    if sampling.temperature == 0:
        return 0.0
    ranked = np.sort(logits)[::-1]
    kept = ranked[: sampling.top_k or None]
    chances = np.exp((kept - kept[0]) / sampling.temperature)
    likelier = (ranked > logits[token]).sum()
    far = [0.0, float(ranked[0] - logits[token]) + sampling.temperature * _log(sampling.min_p)]
    if 0 < sampling.top_k <= likelier:
        far.append(float(ranked[sampling.top_k - 1] - logits[token]))
    before = chances[:likelier].sum() / chances.sum()
    if before >= sampling.top_p:
        far.append(sampling.temperature * _log(before / sampling.top_p))
    return max(far)


def _log(x: float) -> float:
    return math.log(x) if x else -math.inf


def _scores(
    target: Decoder, config: DecodeConfig, request: Request, output: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the next token's logits after penalties and biases, float32 [V], and with noise."""
    text = [*request.prompt, *output]
    pages = -(-len(text) // config.page_size)
    tokens = np.zeros((1, pages * config.page_size), np.int32)
    tokens[0, : len(text)] = text
    graph, weights = nnx.split(target)
    controls = logit_controls.of_request(request, output, tokens.shape[1])
    params = SamplingParams.of(request.sampling)
    controls, params = jax.tree.map(lambda x: np.asarray(x)[None], (controls, params))
    stops = np.array([request.stop_ids or (-1,)], np.int32)
    sizes = pages, config.page_size, config.kv_dtype
    length = np.array([len(text)], np.int32)
    with jax.default_matmul_precision(matmul_precision(target.dtype)):
        results = _compiled(graph, sizes, weights, tokens, length, controls, params, stops)
    logits, scores = map(np.asarray, results)
    return logits, scores


@functools.partial(jax.jit, static_argnums=(0, 1))
def _compiled(
    graph: nnx.GraphDef,
    sizes: tuple[int, int, str],
    weights: nnx.State,
    tokens: jax.Array,
    length: jax.Array,
    controls: Controls,
    params: SamplingParams,
    stops: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    target, (pages, page_size, kv_dtype) = nnx.merge(graph, weights), sizes
    copies = target.sharding.size("pages")  # A text for each shard of the pages, the same.
    abstract = target.new_cache(
        batch=copies,
        pages_per_sequence=pages,
        num_pages=copies * (pages + 1),  # Page 0 of each shard is scratch.
        page_size=page_size,
        kv_dtype=kv_dtype,
    )
    cache = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract)
    table = jnp.tile(jnp.arange(1, pages + 1, dtype=jnp.int32), (copies, 1))
    cache = dataclasses.replace(cache, page_table=table)
    tokens, counts = jnp.tile(tokens, (copies, 1)), jnp.tile(length, copies)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden = target(tokens, positions, cache, count=counts).hidden[:1]
    logits = target.unembed(jnp.take_along_axis(hidden, length[:, None, None] - 1, axis=1))
    none = jnp.zeros((1, 0), jnp.int32)
    shaped = logit_controls.shape_logits(logits, controls, length, stops, none)
    # Without filters, whose border is compared on the host.
    unfiltered = dataclasses.replace(
        params.with_keys(),
        top_k=jnp.zeros_like(params.top_k),
        top_p=jnp.ones_like(params.top_p),
        min_p=jnp.zeros_like(params.min_p),
    )
    scores = sampling.perturbed(shaped, length[:, None], unfiltered, sampling.COUPLED)
    temperature = params.temperature[0]
    scores = scores * jnp.where(temperature > 0, temperature, 1.0)
    results = shaped[0, 0], scores[0, 0]
    return jax.lax.with_sharding_constraint(results, target.sharding.replicated())
