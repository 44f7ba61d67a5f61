"""Mean acceptance length (τ) of a drafter on recorded answers, without decoding.

The drafter replays the cycles of the answers; see `replay`. At temperature 0 a draft is accepted
iff it is the answer's own token. At other temperatures a draft is accepted by chance, so a cycle
begins at every token, in which all drafts are the answer's tokens, and the expected number of
cycles follows from their chances; see `rounds`. That is exact over the noise of drafting and
verification, and needs neither the seed nor the program that drew the answers.
"""

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash import errors
from dflash.config.schema import DecodeConfig, SamplingConfig
from dflash.drafters.base import Drafter, Heads
from dflash.drafters.parts.draft_vocabulary import DraftTokens
from dflash.inference import replay, rounds
from dflash.inference.logits import sampling
from dflash.inference.logits.sampling import SamplingParams
from dflash.inference.replay import Text, Texts
from dflash.inference.request import RequestSampling
from dflash.models.decoder import Decoder

_FILLER = Text((0,), (0,))  # A text without cycles.
_UNSHAPED = ("presence_penalty", "frequency_penalty", "repetition_penalty")


class AnswersTest:
    """Measurement of τ on the same answers at every call; compiles its programs once.

    Usage:
      test = AnswersTest(target, drafter, {"math": [Text(prompt_ids, output_ids), ...]})
      test(params)  # {"tau": 4.2, "tau/math": 4.2}
    """

    def __init__(
        self,
        target: Decoder,
        drafter: Drafter,
        answers: Mapping[str, Sequence[Text]],
        config: DecodeConfig | None = None,
        *,
        batch_size: int = 32,
    ):
        """Groups the answers by length; nothing is compiled yet.

        Args:
          drafter: Drafter with the target's dtype; its parameters may be abstract.
          config: Sampling parameters that the answers were drawn with, and the verification rule;
            None for greedy answers. Other keys have no effect.
          batch_size: Answers that are computed at once.
        Raises:
          InputError: A text is empty, or has a token outside the target's vocabulary.
          ConfigError: The chances under this config are not known.
        """
        self._target, self._drafter = target, drafter
        self._config = config or DecodeConfig()
        check_config(self._config, drafter)
        self._sources = [name for name, some in answers.items() for _ in some]
        self._answers = [answer for some in answers.values() for answer in some]
        _check_answers(self._answers, target.arch.vocab_size)
        # All texts of a group run as long as the one with the most cycles.
        order = sorted(range(len(self._answers)), key=lambda i: _sizes(self._answers[i]))
        self._groups = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
        self._batch_size = min(batch_size, len(order))
        # The target's outputs stay on the devices: (C + 1) · D numbers for each token.
        self._texts: dict[int, Texts] = {}

    def __call__(self, params: Any) -> dict[str, float]:
        """Scores the drafter's parameters `params`.

        Returns:
          Mean acceptance length "tau" over all cycles, and "tau/NAME" per source, in tokens per
          cycle; empty if every answer is a single token.
        """
        nnx.update(self._drafter, params)
        drafter = nnx.clone(self._drafter)
        drafter.tabulate(self._target)
        tokens: dict[str, float] = collections.defaultdict(float)
        cycles: dict[str, float] = collections.defaultdict(float)
        for index, count in self._cycles(drafter):
            tokens[self._sources[index]] += len(self._answers[index].answer) - 1
            cycles[self._sources[index]] += float(count)
        total = sum(cycles.values())
        if not total:
            return {}
        by_source = {f"tau/{name}": tokens[name] / cycles[name] for name in cycles if cycles[name]}
        return {"tau": sum(tokens.values()) / total} | by_source

    def _cycles(self, drafter: Drafter) -> Iterator[tuple[int, float]]:
        """Yields the number of each answer, and the expected cycles after its first token."""
        samples = self._config.temperature > 0
        options = {}
        if samples and drafter.has_probs:
            options = {"everywhere": True, "make_sampler": _AnswerSamplers(self._config)}
        for number, group in enumerate(self._groups):
            if number not in self._texts:
                self._texts[number] = self._compute([self._answers[i] for i in group])
            found = replay.cycles(drafter, self._target, self._texts[number], **options)
            yield from zip(group, self._count(found, group), strict=False)

    def _compute(self, answers: Sequence[Text]) -> Texts:
        filled = [*answers, *[_FILLER] * (self._batch_size - len(answers))]
        return replay.compute(self._target, filled, self._drafter.feature_layers)

    def _count(self, cycles: replay.Cycles, group: Sequence[int]) -> np.ndarray:
        """Returns the expected cycles of each answer of a group, float [at least the group's]."""
        if cycles.probs is None:
            return (cycles.committed > 0).sum(axis=1)
        counts = np.array([len(self._answers[i].answer) - 1 for i in group])
        return rounds.expected_cycles(cycles.probs[: len(group), : counts.max(), :, 0], counts)


def check_config(config: DecodeConfig, drafter: Drafter) -> None:
    """Raises ConfigError if the chances that drafts are accepted are not known."""
    if not config.temperature:
        return
    problems = [
        f"decode.{name}: is not supported above temperature 0 when τ is computed; leave it out"
        for name in _UNSHAPED
        if getattr(config, name) != getattr(SamplingConfig, name)
    ]
    if drafter.drafts_trees:
        problems.append(
            "decode.temperature: τ of trees is computed at temperature 0 only; set it to 0, or "
            "leave drafter.tree out"
        )
    if problems:
        raise errors.ConfigError(*problems)


def _check_answers(answers: Iterable[Text], vocab_size: int) -> None:
    for number, text in enumerate(answers):
        if not text.prompt or not text.answer:
            raise errors.InputError(f"answer {number}: its prompt or the answer itself is empty")
        largest = max(*text.prompt, *text.answer)
        if largest >= vocab_size:
            raise errors.InputError(
                f"answer {number}: token {largest} is outside the vocabulary of {vocab_size} tokens"
            )


def _sizes(text: Text) -> tuple[int, int]:
    return replay.padded_length(text), len(text.answer)


# --- device functions ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _AnswerSamplers:
    """Maker of samplers that draw the answers' own tokens; see `replay.cycles`."""

    config: DecodeConfig

    def __call__(self, texts: Texts, heads: Heads) -> "_AnswerSampler":
        single = SamplingParams.of(RequestSampling.from_config(self.config))
        size = len(texts.tokens)
        params = jax.tree.map(lambda x: jnp.broadcast_to(x, (size, *x.shape)), single)
        return _AnswerSampler(params, texts, heads, self.config.verify)


@dataclasses.dataclass(frozen=True)
class _AnswerSampler:
    """Sampler that draws the answers' own tokens, as if all drafts had been accepted.

    In place of probabilities it returns the chances that they would have been.
    """

    params: SamplingParams
    texts: Texts
    heads: Heads
    verify: str
    vocabulary: DraftTokens | None = None

    def among(self, vocabulary: DraftTokens) -> "_AnswerSampler":
        """Returns a sampler for logits of a draft vocabulary; see `parts.sampler.Sampler`."""
        return dataclasses.replace(self, vocabulary=vocabulary)

    def propose(self, logits: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the tokens at `positions`, int32 [B, t], and their chances, [B, t, 1]."""
        tokens = jnp.take_along_axis(self.texts.tokens, positions, axis=1, mode="clip")
        q = jax.nn.log_softmax(sampling.filter_logits(logits, self.params))
        if self.vocabulary is not None:
            q = self.vocabulary.spread(q, -jnp.inf)
        before = positions[..., None] - 1
        hidden = jnp.take_along_axis(self.texts.hidden, before, axis=1, mode="clip")
        p = sampling.filter_logits(self.heads.unembed(hidden), self.params)
        return tokens, _CHANCES[self.verify](jax.nn.log_softmax(p), q, tokens)[..., None]


def coupled_chance(p: jax.Array, q: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the chance that the drafter draws the token that the target has drawn.

    Both draw the largest sum of log-probability and Gumbel noise, with the same noise g. Both draw
    x iff g_x - g_v >= log max(p_v / p_x, q_v / q_x) for all v, which has the probability
    1 / Σ_v max(p_v / p_x, q_v / q_x). Given the target's x, it is 1 / Σ_v max(p_v, q_v p_x / q_x).

    Args:
      p: The target's log-probabilities, float32 [..., V]; -inf for filtered tokens.
      q: The drafter's, float32 [..., V].
      tokens: Tokens that the target has drawn, int32 [...].
    """
    p_x, q_x = _of_tokens(p, tokens), _of_tokens(q, tokens)
    can_draw = jnp.isfinite(q_x)
    ratio = p_x - jnp.where(can_draw, q_x, 0.0)
    log_chance = -jax.nn.logsumexp(jnp.maximum(p, q + ratio[..., None]), axis=-1)
    return jnp.where(can_draw, jnp.minimum(jnp.exp(log_chance), 1.0), 0.0)


def rejection_chance(p: jax.Array, q: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the chance min(1, q_x / p_x) that rejection verification accepts x as the draft.

    That is the probability min(p_x, q_x) of an accepted x, given that the token is x. The arguments
    are those of `coupled_chance`.
    """
    p_x, q_x = _of_tokens(p, tokens), _of_tokens(q, tokens)
    return jnp.exp(jnp.minimum(q_x - jnp.where(jnp.isfinite(p_x), p_x, 0.0), 0.0))


_CHANCES = {"coupled": coupled_chance, "rejection": rejection_chance}


def _of_tokens(log_probs: jax.Array, tokens: jax.Array) -> jax.Array:
    return jnp.take_along_axis(log_probs, tokens[..., None], axis=-1)[..., 0]
