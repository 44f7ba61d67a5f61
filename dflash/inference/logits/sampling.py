"""Sampling with noise that is a function of the position.

The noise for the token at absolute position p of a sequence depends only on the sequence's seed and
on p. Drafter and target use the same noise, in any block, batch or tree, so a sampled output does
not depend on how it was drafted.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from dflash.config.schema import SamplingConfig
from dflash.drafters.parts.draft_vocabulary import DraftTokens
from dflash.drafters.parts.sampler import Candidates
from dflash.inference.logits import top_k_top_p
from dflash.inference.request import RequestSampling
from dflash.kernels.argmax import argmax
from dflash.kernels.packing import Packing
from dflash.kernels.unembed_tiles import Noise

# Streams of noise. Rejection verification needs independent noise for its three uses; coupled
# verification needs the same noise everywhere, and uses only COUPLED.
COUPLED, DRAFT, ACCEPT, RESIDUAL = range(4)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of B sequences.

    Attributes:
      seed: uint32 [B, 2]; threefry key data of the sequence.
      temperature: float32 [B]; 0 is greedy.
      top_k: int32 [B]; 0 is off.
      top_p: float32 [B]; 1 is off.
      min_p: float32 [B]; 0 is off.
    """

    seed: jax.Array
    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array

    @classmethod
    def of(cls, sampling: RequestSampling) -> "SamplingParams":
        """Returns the parameters of one sequence, as numpy scalars without a batch axis.

        Its seed is uint32 [3], the high and the low half of the seed and the sequence number, which
        `with_keys` converts to key data.
        """
        seed = int(sampling.seed)
        halves = (seed >> 32) & _LOW_HALF, seed & _LOW_HALF
        return cls(
            seed=np.array([*halves, sampling.sequence], np.uint32),
            **{name: _on_device(sampling, name) for name in _NUMBERS},
        )

    def with_keys(self) -> "SamplingParams":
        """Returns the parameters with each seed and sequence number converted to key data."""

        def key_data(words):
            key = jax.random.wrap_key_data(words[:2], impl="threefry2x32")
            return jax.random.key_data(jax.random.fold_in(key, words[2]))

        return dataclasses.replace(self, seed=jax.vmap(key_data)(self.seed))

    @property
    def ranks(self) -> jax.Array:
        """Returns whether sampling needs the order of the likeliest tokens, bool [B]."""
        return (self.temperature > 0) & ((self.top_k > 0) | (self.top_p < 1.0))

    @property
    def filters(self) -> jax.Array:
        """Returns whether sampling leaves tokens out, bool [B]."""
        return self.ranks | ((self.temperature > 0) & (self.min_p > 0))

    def filled(self, config: SamplingConfig) -> "SamplingParams":
        """Returns the parameters with the config's values for every sequence; keeps the seeds."""
        values = {
            name: jnp.full_like(getattr(self, name), _on_device(config, name)) for name in _NUMBERS
        }
        return dataclasses.replace(self, **values)


# The parameters that filter and scale logits, with their dtypes on the device.
_NUMBERS = {
    "temperature": np.float32,
    "top_k": np.int32,
    "top_p": np.float32,
    "min_p": np.float32,
}
_LOW_HALF = 0xFFFFFFFF
# Beyond these bounds, scaled logits overflow or vanish in float32. Sampling has converged long
# before: to the likeliest token below, which is greedy, and to the uniform distribution above.
_MIN_TEMPERATURE, _MAX_TEMPERATURE = 1e-6, 1e6


def _on_device(config: SamplingConfig, name: str) -> np.generic:
    """Returns one of the `_NUMBERS` as a scalar of its dtype on the device."""
    value = getattr(config, name)
    if name == "temperature":
        value = min(value, _MAX_TEMPERATURE) if value >= _MIN_TEMPERATURE else 0.0
    return _NUMBERS[name](value)


@dataclasses.dataclass(frozen=True)
class SequenceSampler:
    """Samples for every sequence of a batch with its own parameters.

    Attributes:
      with_probs: Whether drafts are drawn with independent noise and returned with their
        probabilities, as rejection verification requires.
      vocabulary: Draft vocabulary of the logits, which are [B, T, Q] instead of [B, T, V]; None for
        the whole vocabulary. Tokens and probabilities are those of all V tokens in both cases.
      greedy: Whether all sequences are known to be greedy, whatever `params` say: nothing is then
        computed for sampling.
    """

    params: SamplingParams
    with_probs: bool = False
    vocabulary: DraftTokens | None = None
    greedy: bool = False

    def among(self, vocabulary: DraftTokens) -> "SequenceSampler":
        """Returns a sampler for logits of a draft vocabulary; see `parts.sampler.Sampler`."""
        return dataclasses.replace(self, vocabulary=vocabulary)

    def sample(self, logits: jax.Array, positions: jax.Array) -> jax.Array:
        """Samples the target's tokens, int32 [B, T], from logits float32 [B, T, V]."""
        with jax.named_scope("sample"):
            if self.greedy:
                return _name(argmax(logits), self.vocabulary)
            return sample(logits, positions, self.params, COUPLED, self.vocabulary)

    def noise(self, positions: jax.Array) -> Noise | None:
        """Returns the noise that `sample` adds to logits at positions [B, T]; None if greedy."""
        if self.greedy:
            return None
        keys = position_keys(self.params.seed, positions, COUPLED)
        temperature = jnp.broadcast_to(self.params.temperature[:, None], positions.shape)
        return Noise(jax.random.key_data(keys), temperature)

    def propose(
        self, logits: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns a drafter's sampled tokens, int32 [B, T], and probabilities [B, T, V] or None."""
        if not self.with_probs:
            return self.sample(logits, positions), None
        tokens = sample(logits, positions, self.params, DRAFT, self.vocabulary)
        return tokens, self._probabilities(logits)

    def of_rows(
        self, packing: Packing, positions: jax.Array
    ) -> tuple["SequenceSampler", jax.Array]:
        """Returns a sampler of packed rows, each as a sequence of one token, and their positions.

        Args:
          packing: Packing of N rows in each of D replicas.
          positions: Positions of the padded rows, int32 [B or 1, R].
        Returns:
          A sampler of D · N sequences, and int32 [D · N, 1].
        """

        def by_row(values):
            return packing.spread(values).reshape(-1, *values.shape[1:])

        params = jax.tree.map(by_row, self.params)
        padded = jnp.broadcast_to(positions, packing.place.shape)
        sampler = dataclasses.replace(self, params=params)
        return sampler, packing.pack(padded).reshape(-1, 1)

    def candidates(self, logits: jax.Array, positions: jax.Array, count: int) -> Candidates:
        """Returns the likeliest tokens of each position; see `parts.sampler.Sampler`.

        Coupled verification accepts the token whose logit plus noise is largest, so candidates are
        ranked by that sum. Scores are the log-softmax of the sums times the temperature, which
        approach those of greedy decoding as the temperature falls.

        For rejection verification, the tokens with the largest sums are draws without replacement,
        in this order (Kool et al. 2019, arXiv 1903.06059). Scores are the largest probabilities,
        independent of the draws.
        """
        if self.greedy:
            values, tokens = jax.lax.top_k(logits, count)
            return Candidates(_name(tokens, self.vocabulary), _log_probs(values, logits), None)
        samples = self.params.temperature[:, None, None] > 0
        if not self.with_probs:
            sums = perturbed(logits, positions, self.params, COUPLED, self.vocabulary)
            sums = sums * jnp.where(samples, self.params.temperature[:, None, None], 1.0)
            values, tokens = jax.lax.top_k(sums, count)
            return Candidates(_name(tokens, self.vocabulary), _log_probs(values, sums), None)
        noisy = perturbed(logits, positions, self.params, DRAFT, self.vocabulary)
        tokens = _name(jax.lax.top_k(noisy, count)[1], self.vocabulary)
        likely = jnp.where(samples, filter_logits(logits, self.params), logits)
        scores = _log_probs(jax.lax.top_k(likely, count)[0], likely)
        return Candidates(tokens, scores, self._probabilities(logits))

    def _probabilities(self, logits: jax.Array) -> jax.Array:
        """Returns the distribution of drafts, [B, T, V]."""
        probs = probabilities(logits, self.params)
        return probs if self.vocabulary is None else self.vocabulary.spread(probs, 0.0)


def sample(
    logits: jax.Array,
    positions: jax.Array,
    params: SamplingParams,
    stream: int,
    vocabulary: DraftTokens | None = None,
) -> jax.Array:
    """Samples one token per row by the Gumbel-max trick; greedy rows take the largest logit.

    Args:
      logits: float32 [B, T, V], or [B, T, Q] for a draft vocabulary.
      positions: int32 [B, T]; positions of the tokens to sample.
      stream: Stream of noise: COUPLED, DRAFT, ACCEPT or RESIDUAL.
      vocabulary: Draft vocabulary of the logits; None for the whole vocabulary.
    Returns:
      Token ids of the target, int32 [B, T].
    """
    greedy = argmax(logits)

    def draw():
        noisy = _add_noise(logits, positions, params, stream, vocabulary)
        drawn = argmax(noisy)
        return jnp.where(params.temperature[:, None] > 0, drawn, greedy)

    # Noise over a large vocabulary costs more than the argmax; an all-greedy batch skips it.
    with jax.named_scope("if_sampled"):
        drawn = jax.lax.cond(jnp.any(params.temperature > 0), draw, lambda: greedy)
    return _name(drawn, vocabulary)


def perturbed(
    logits: jax.Array,
    positions: jax.Array,
    params: SamplingParams,
    stream: int,
    vocabulary: DraftTokens | None = None,
) -> jax.Array:
    """Returns the values whose argmax `sample` takes: logits plus noise, or greedy rows' logits."""

    def perturb():
        noisy = _add_noise(logits, positions, params, stream, vocabulary)
        return jnp.where(params.temperature[:, None, None] > 0, noisy, logits)

    return jax.lax.cond(jnp.any(params.temperature > 0), perturb, lambda: logits)


def _add_noise(logits, positions, params, stream, vocabulary) -> jax.Array:
    """Adds noise that depends on the target's token id, in a draft vocabulary too."""
    keys = position_keys(params.seed, positions, stream)
    size = logits.shape[-1] if vocabulary is None else vocabulary.target_size
    noise = jax.vmap(jax.vmap(lambda key: jax.random.gumbel(key, (size,))))(keys)
    if vocabulary is not None:
        noise = vocabulary.pick(noise)
    return filter_logits(logits, params) + noise


def _name(tokens: jax.Array, vocabulary: DraftTokens | None) -> jax.Array:
    """Converts indices of a draft vocabulary to the target's token ids."""
    return tokens if vocabulary is None else vocabulary.name(tokens)


def _log_probs(values: jax.Array, logits: jax.Array) -> jax.Array:
    """Returns log-probabilities of `values` [B, T, k], a subset of the logits [B, T, V]."""
    return jnp.minimum(values - jax.nn.logsumexp(logits, axis=-1, keepdims=True), 0.0)


def uniform(
    positions: jax.Array, params: SamplingParams, stream: int, index: jax.Array | None = None
) -> jax.Array:
    """Returns uniform noise in [0, 1) for each position, float32 [B, T].

    Args:
      positions: int32 [B, T].
      stream: Stream of noise: COUPLED, DRAFT, ACCEPT or RESIDUAL.
      index: int32 [B, T] or None; number of the draw among several of one position.
    """
    keys = position_keys(params.seed, positions, stream)
    if index is not None:
        keys = jax.vmap(jax.vmap(jax.random.fold_in))(keys, index)
    return jax.vmap(jax.vmap(jax.random.uniform))(keys)


def position_keys(seed: jax.Array, positions: jax.Array, stream: int) -> jax.Array:
    """Returns noise keys [B, T] for positions int32 [B, T] and seeds uint32 [B, 2]."""

    def key(sequence, position):
        folded = jax.random.fold_in(sequence, position)
        return folded if stream == COUPLED else jax.random.fold_in(folded, stream)

    sequences = jax.random.wrap_key_data(seed, impl="threefry2x32")
    return jax.vmap(jax.vmap(key, in_axes=(None, 0)))(sequences, positions)


def filter_logits(logits: jax.Array, params: SamplingParams) -> jax.Array:
    """Applies temperature, top-k, top-p and min-p, in this order; filtered logits become -inf.

    Args:
      logits: float32 [B, T, V].
      params: Sampling parameters of the B sequences; greedy ones use a temperature of 1.
    """
    temperature = jnp.where(params.temperature > 0, params.temperature, 1.0)[:, None, None]
    logits = logits / temperature

    def filtered():
        # Ranking the vocabulary is expensive; skip it unless a sampled sequence needs it.
        with jax.named_scope("if_filtered"):
            likeliest = jax.lax.cond(
                jnp.any(params.ranks),
                lambda: top_k_top_p.top_k_top_p(logits, params.top_k, params.top_p),
                lambda: logits,
            )
        return _min_p(likeliest, params)

    with jax.named_scope("if_filtered"):
        return jax.lax.cond(jnp.any(params.filters), filtered, lambda: logits)


def _min_p(logits: jax.Array, params: SamplingParams) -> jax.Array:
    """Keeps tokens at least min_p times as likely as the likeliest (Nguyen et al., 2407.01082).

    Other filters always keep the likeliest token, so they do not change this ratio.
    """
    min_p = params.min_p[:, None, None]
    ratio = jnp.exp(logits - logits.max(axis=-1, keepdims=True))
    return jnp.where((ratio >= min_p) | (min_p <= 0), logits, -jnp.inf)


def probabilities(logits: jax.Array, params: SamplingParams) -> jax.Array:
    """Returns the distribution [B, T, V] of `sample`; one-hot for greedy sequences."""
    drawn = jax.nn.softmax(filter_logits(logits, params), axis=-1)
    greedy = jax.nn.one_hot(argmax(logits), logits.shape[-1], dtype=drawn.dtype)
    return jnp.where(params.temperature[:, None, None] > 0, drawn, greedy)
