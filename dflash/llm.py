"""Decoding from Python: a target and a drafter that stay in memory between calls.

>>> import dflash
>>> llm = dflash.LLM("configs/tiny_dflash.yml", "decode.max_new_tokens=24")
>>> completion, = llm.generate("Tom has 4 boxes with 6 pens each. How many pens does Tom have?")
>>> completion.finish_reason, len(completion.token_ids)
('length', 24)
>>> sum(completion.acceptance_lengths) == 23  # the first token comes from the prompt's own pass
True

The output is the target's own, whatever the drafter:

>>> plain = llm.with_drafter("none")  # shares the target's weights
>>> plain.generate(completion.prompt)[0].text == completion.text
True
"""

import copy
import dataclasses
import functools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from dflash import errors
from dflash.config import loader, registry
from dflash.config.schema import DecodeRun
from dflash.inference import request as requests
from dflash.inference.engine import Engine
from dflash.inference.request import Request, TokenLogprobs
from dflash.loading import job as jobs
from dflash.loading import models
from dflash.loading.job import Job
from dflash.offline.decoding import decode
from dflash.runs import compilation_cache as compilation_cache_lib
from dflash.sampling import Sampling
from dflash.text import prompts as prompts_lib
from dflash.text.grammar import Vocabulary
from dflash.text.prompts import Prompt
from dflash.text.tokenizer import IncrementalDecoder, Tokenizer

_MIN_LENGTH = 512  # tokens that an engine has room for, so that like lengths share its programs


@dataclasses.dataclass(frozen=True)
class Piece:
    """Newly accepted tokens of one kind.

    Attributes:
      text: what can be shown now; characters wait for their last token.
      token_ids: the tokens.
      drafted: whether they are accepted drafts; otherwise they are the target's own, which there is
        one of in each cycle, at its end.
      logprobs: of the tokens, if asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    drafted: bool
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclasses.dataclass(frozen=True)
class Completion:
    """A prompt and its output.

    Attributes:
      prompt: as it was given.
      prompt_token_ids: its tokens.
      text: the output, without special tokens.
      token_ids: the output's tokens, a stop token included.
      finish_reason: "stop" (a stop token, which is the last of `token_ids`), "length", or "error":
        the output could not be continued as its grammar demands.
      acceptance_lengths: tokens committed in each cycle. The first token comes from the prompt's
        own pass, so they sum to len(token_ids) - 1.
      prefill_ms: time from the prompt's start to its first token.
      decode_ms: time from the first token to the last.
      logprobs: of each of `token_ids`, if asked for.
    """

    prompt: prompts_lib.Value
    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length", "error"]
    acceptance_lengths: tuple[int, ...]
    prefill_ms: float
    decode_ms: float
    logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def tau(self) -> float:
        """Mean acceptance length; nan where the first token was also the last."""
        lengths = self.acceptance_lengths
        return sum(lengths) / len(lengths) if lengths else float("nan")


class Stream(Iterator[Piece]):
    """The pieces of an output as they are accepted; see `LLM.stream`.

    Attributes:
      completion: the whole, once all pieces have been taken; None before.
    """

    def __init__(self, pieces: Iterator[Piece | Completion]):
        """Takes pieces, the last of which is the completion."""
        self._pieces = pieces
        self.completion: Completion | None = None

    def __next__(self) -> Piece:
        """The next piece; waits for it."""
        piece = next(self._pieces)
        if isinstance(piece, Completion):
            self.completion = piece
            raise StopIteration
        return piece


class LLM:
    """A target with a drafter, in memory, ready to decode.

    Programs are compiled when the first prompt of a length needs them, and kept; those of earlier
    processes come from jax's persistent compilation cache. Not for several threads at once.
    """

    def __init__(
        self,
        config: str | os.PathLike | None = None,
        *overrides: str,
        target: str | os.PathLike | None = None,
        drafter: str | os.PathLike | None = None,
        compilation_cache: str | None = None,
    ):
        """Reads the config, and the weights.

        Args:
          config: a YAML file, as the commands take it; None for the defaults.
          *overrides: `key=value`, as the commands take them.
          target: directory or hf:org/name of the target, instead of the config's.
          drafter: that of a drafter, or the name of a strategy, such as "ngram".
          compilation_cache: directory for compiled programs, or "off"; see --compilation_cache.
        Raises:
          UserError: the config is unusable, or a checkpoint is missing or damaged.
        """
        if config is not None and "=" in os.fspath(config):
            config, overrides = None, (os.fspath(config), *overrides)
        if config is None and target is None:
            raise errors.ConfigError("expected a config file, or target=")
        self._path = config
        self._overrides = (*overrides, *_target_overrides(target), *_drafter_overrides(drafter))
        run = loader.load(self._path, self._overrides)
        compilation_cache_lib.enable(compilation_cache)
        self._job = jobs.prepare_models(run)
        self._job.load_weights()
        self._engine: Engine | None = None

    @property
    def config(self) -> DecodeRun:
        """The resolved config."""
        return self._job.config

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's tokenizer."""
        return self._job.tokenizer

    def with_drafter(self, drafter: str | os.PathLike, *overrides: str) -> "LLM":
        """The same target, whose weights are shared, with another drafter.

        Programs are shared too where the drafters differ in their weights alone. Overrides that
        the drafter before was given do not apply to this one.

        Args:
          drafter: name of a strategy, or directory or hf:org/name of a drafter.
          *overrides: `key=value` for its own keys, or for `decode`.
        Raises:
          UserError: the drafter is missing, damaged or does not fit, or an override concerns the
            target.
        """
        other = copy.copy(self)
        kept = [one for one in self._overrides if not one.startswith("drafter.")]
        other._overrides = (*kept, *_drafter_overrides(drafter), *overrides)
        run = loader.load(self._path, other._overrides)
        if jobs.target_key(run) != jobs.target_key(self.config):
            raise errors.ConfigError(
                "with_drafter shares the target: leave target, mesh, sharding_rules and dtype as "
                "they are, or make another LLM"
            )
        other._job = self._job.with_drafter(run)
        other._job.load_drafter()
        same_loop = run.decode == self.config.decode
        shares = self._engine is not None and same_loop
        other._engine = self._engine.with_drafter(other._job.drafter) if shares else None
        return other

    def generate(
        self,
        prompts: prompts_lib.Value | Iterable[prompts_lib.Value],
        sampling: Sampling | None = None,
    ) -> list[Completion]:
        """Decodes prompts, as many at a time as `decode.batch_size` says.

        Args:
          prompts: each a text, token ids, or messages with "role" and "content"; a single text may
            stand alone. Text goes through the chat template where `prompts.chat` says so.
          sampling: for all of them.
        Returns:
          A completion for each prompt, in their order.
        Raises:
          InputError: a prompt is unusable or too long; nothing has been decoded then.
        """
        values = [prompts] if isinstance(prompts, str) else list(prompts)
        if not values:
            return []
        job, engine, asked = self._prepare(values, sampling)
        done: dict[int, requests.Completion] = {}
        logprobs: dict[int, list[TokenLogprobs]] = {request.id: [] for request in asked}
        for event in decode(engine, asked):
            if isinstance(event, requests.Completion):
                done[event.id] = event
            else:
                logprobs[event.id] += event.logprobs
        return [
            _completion(value, prompt, done[prompt.index], job.tokenizer, logprobs[prompt.index])
            for value, prompt in zip(values, job.prompts, strict=True)
        ]

    def chat(
        self, messages: Iterable[Mapping[str, Any]], sampling: Sampling | None = None
    ) -> Completion:
        """The answer to a conversation, through the checkpoint's chat template.

        Args:
          messages: each with "role" and "content"; the last one is usually the user's.
          sampling: how to draw it.
        Raises:
          InputError: there is no chat template, it refuses these messages, or they are too long.
        """
        return self.generate([list(messages)], sampling)[0]

    def stream(self, prompt: prompts_lib.Value, sampling: Sampling | None = None) -> Stream:
        """Decodes one prompt piece by piece.

        >>> llm = LLM("configs/tiny_dflash.yml")
        >>> stream = llm.stream("Which arguments does `os.getcwd()` take?", Sampling(max_tokens=8))
        >>> text = "".join(piece.text for piece in stream)
        >>> text == stream.completion.text
        True

        Args:
          prompt: a text, token ids or messages, as for `generate`.
          sampling: how to draw its output.
        Returns:
          An iterator of pieces, whose `completion` is there once it has ended.
        Raises:
          InputError: the prompt is unusable or too long; before the first piece.
        """
        return Stream(_pieces(prompt, *self._prepare([prompt], sampling)))

    def _prepare(self, values: Sequence[prompts_lib.Value], sampling: Sampling | None):
        """A job over these prompts, an engine with all programs that they need, and requests."""
        config, sampling = self.config, sampling or Sampling()
        decode_config = sampling.applied_to(config.decode)
        job = dataclasses.replace(
            self._job, config=dataclasses.replace(config, decode=decode_config)
        )
        vocab_size = job.target.arch.vocab_size
        found = prompts_lib.from_values(
            values, config.prompts, job.tokenizer, vocab_size=vocab_size
        )
        job = jobs.with_prompts(job, found)
        asked = sampling.requests(job.requests(found), lambda: self._vocabulary)
        for request in asked:
            requests.check_request(request, max_length=job.max_length, vocab_size=vocab_size)
        engine = self._engine
        if engine is None or not engine.has_room(job.max_length, len(job.stop_ids)):
            engine = self._engine = _roomy(job).engine()
        constrained = any(request.grammar is not None for request in asked)
        engine.compile((len(prompt.ids) for prompt in found), grammars=constrained)
        return job, engine, asked

    @functools.cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary.of(self.tokenizer)


def _target_overrides(target: str | os.PathLike | None) -> tuple[str, ...]:
    return () if target is None else (f"target.checkpoint={os.fspath(target)}",)


def _drafter_overrides(drafter: str | os.PathLike | None) -> tuple[str, ...]:
    """A drafter as overrides of a config: the name of a strategy, or a checkpoint of one."""
    if drafter is None:
        return ()
    reference = os.fspath(drafter)
    if reference in registry.DRAFTERS:
        return (f"drafter.name={reference}",)
    try:
        name = models.find_strategy(reference)
    except errors.CheckpointError as error:
        near = registry.suggest(reference, registry.DRAFTERS, exhaustive=False)
        raise errors.CheckpointError(f"drafter: {error}{near}") from error
    return f"drafter.name={name}", f"drafter.checkpoint={reference}"


def _roomy(job: Job) -> Job:
    """The job with room for longer prompts than its own: a power of two, as far as there is one."""
    if job.config.decode.max_length is not None:
        return job
    positions = job.target.arch.max_position_embeddings
    length = max(_MIN_LENGTH, 1 << (job.max_length - 1).bit_length())
    return dataclasses.replace(job, max_length=max(job.max_length, min(length, positions)))


def _pieces(
    value: prompts_lib.Value, job: Job, engine: Engine, asked: Sequence[Request]
) -> Iterator[Piece | Completion]:
    """The pieces of the only prompt of a job, and its completion."""
    (prompt,) = job.prompts
    words = IncrementalDecoder(job.tokenizer)
    logprobs: list[TokenLogprobs] = []
    for event in decode(engine, asked):
        if isinstance(event, requests.Completion):
            rest = words.flush()
            if rest:
                yield Piece(rest, (), drafted=False)
            yield _completion(value, prompt, event, job.tokenizer, logprobs)
            return
        logprobs += event.logprobs
        begin = 0
        for length in event.acceptance_lengths or (len(event.ids),):
            end = begin + length
            for first, last, drafted in ((begin, end - 1, True), (end - 1, end, False)):
                ids = event.ids[first:last]
                if ids:
                    yield Piece(words.push(ids), ids, drafted, event.logprobs[first:last])
            begin = end


def _completion(
    value: prompts_lib.Value,
    prompt: Prompt,
    found: requests.Completion,
    tokenizer: Tokenizer,
    logprobs: Sequence[TokenLogprobs],
) -> Completion:
    return Completion(
        prompt=value,
        prompt_token_ids=prompt.ids,
        text=tokenizer.decode(found.output_ids),
        token_ids=found.output_ids,
        finish_reason=found.finish_reason,
        acceptance_lengths=found.acceptance_lengths,
        prefill_ms=found.prefill_ms,
        decode_ms=found.decode_ms,
        logprobs=tuple(logprobs),
    )
