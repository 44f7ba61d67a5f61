"""Decoding from Python: a target and a drafter that stay in memory between calls.

>>> import dflash
>>> llm = dflash.LLM("configs/tiny_dflash.yml", "decode.max_new_tokens=24")
>>> completion, = llm.generate("Tom has 4 boxes with 6 pens each. How many pens does Tom have?")
>>> completion.finish_reason, len(completion.token_ids)
('length', 24)
>>> sum(completion.acceptance_lengths) == 23  # The prefill yields the first token.
True

The output does not depend on the drafter:

>>> plain = llm.with_drafter("none")  # shares the target's weights
>>> plain.generate(completion.prompt)[0].text == completion.text
True
"""

import copy
import dataclasses
import functools
import inspect
import os
import weakref
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from dflash import errors
from dflash.config import loader
from dflash.config.schema import DecodeRun
from dflash.drafters.base import Drafter
from dflash.inference import request as requests
from dflash.inference import weight_update
from dflash.inference.engine import Engine
from dflash.inference.logits import controls
from dflash.inference.request import Request, TokenLogprobs
from dflash.loading import job as jobs
from dflash.loading import models
from dflash.loading.job import Job
from dflash.models.decoder import Decoder
from dflash.offline.decoding import decode
from dflash.runs import compilation_cache as compilation_cache_lib
from dflash.sampling import Sampling
from dflash.text import prompts as prompts_lib
from dflash.text.grammar import Vocabulary
from dflash.text.prompts import Prompt
from dflash.text.tokenizer import IncrementalDecoder, Tokenizer, decode_output

# Fewest tokens that an engine has room for, so that prompts of similar lengths share its programs.
_MIN_LENGTH = 512


@dataclasses.dataclass(frozen=True)
class Piece:
    """Newly accepted tokens of one kind.

    Attributes:
      text: Text that is complete so far; a character appears with its last token.
      drafted: Whether these are accepted drafts; otherwise this is the token that the target adds
        at the end of each cycle. A cycle in which the output ends within the draft has none.
      logprobs: Log-probabilities of the tokens, if requested.
    """

    text: str
    token_ids: tuple[int, ...]
    drafted: bool
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclasses.dataclass(frozen=True)
class Completion:
    """Prompt and its output.

    Attributes:
      prompt: Prompt as passed by the caller.
      text: Text that the output adds to the prompt's, without special tokens and without that of a
        stop token.
      token_ids: Token ids of the output, a stop token included.
      finish_reason: "stop" (the last token is a stop token), "length", or "error" (the output could
        not be continued according to its grammar).
      acceptance_lengths: Tokens committed in each cycle. The first token comes from the prefill, so
        they sum to len(token_ids) - 1.
      prefill_ms: Time from the start of the prefill to the first token, in milliseconds.
      decode_ms: Time from the first token to the last, in milliseconds.
      logprobs: Log-probabilities of each output token, if requested.
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
        """Mean acceptance length (τ); nan if the first token was also the last."""
        lengths = self.acceptance_lengths
        return sum(lengths) / len(lengths) if lengths else float("nan")


class Stream(Iterator[Piece]):
    """Iterator over the pieces of an output as they are accepted; see `LLM.stream`.

    Attributes:
      completion: Completion of the prompt; None until the iterator is exhausted.
    """

    def __init__(self, pieces: Generator[Piece | Completion]):
        """Wraps an iterator of pieces, the last of which is the completion."""
        self._pieces = pieces
        self.completion: Completion | None = None

    @property
    def is_open(self) -> bool:
        """Returns whether the output is being decoded: started, and not finished."""
        suspended = inspect.getgeneratorstate(self._pieces) == inspect.GEN_SUSPENDED
        return suspended and self.completion is None

    def __next__(self) -> Piece:
        """Waits for the next piece and returns it."""
        piece = next(self._pieces)
        if isinstance(piece, Completion):
            self.completion = piece
            raise StopIteration
        return piece


class LLM:
    """Target with a drafter, loaded and ready to decode.

    Programs are compiled when the first prompt of a length needs them, and kept; those of earlier
    processes come from jax's persistent compilation cache. An instance is not thread-safe.
    """

    def __init__(
        self,
        config: str | os.PathLike | None = None,
        *overrides: str,
        target: str | os.PathLike | None = None,
        drafter: str | os.PathLike | None = None,
        compilation_cache: str | None = None,
    ):
        """Reads the config and loads the weights.

        Args:
          config: Config file, as for the commands; None for the defaults.
          *overrides: Overrides `key=value`, as for the commands.
          target: Directory or hf:org/name of the target; overrides the config.
          drafter: Directory or hf:org/name of a drafter, or the name of a strategy such as "ngram";
            overrides the config.
          compilation_cache: Directory for compiled programs, or "off"; see --compilation_cache.
        Raises:
          UserError: The config is unusable, or a checkpoint is missing or damaged.
        """
        if config is not None and "=" in os.fspath(config):
            config, overrides = None, (os.fspath(config), *overrides)
        if config is None and target is None:
            raise errors.ConfigError("expected a config file, or target=")
        self._path = config
        self._overrides = (*overrides, *models.overrides(target, drafter))
        run = loader.load(self._path, self._overrides)
        compilation_cache_lib.enable(compilation_cache)
        self._job = jobs.prepare_models(run)
        self._job.load_weights()
        self._engine: Engine | None = None
        # Streams of this instance and of those that share its target.
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()

    @property
    def config(self) -> DecodeRun:
        """Resolved config."""
        return self._job.config

    @property
    def target(self) -> Decoder:
        """Target model, with weights."""
        return self._job.target

    @property
    def drafter(self) -> Drafter:
        """Drafter, with weights."""
        return self._job.drafter

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the target."""
        return self._job.tokenizer

    def with_drafter(self, drafter: str | os.PathLike, *overrides: str) -> "LLM":
        """Returns an LLM with another drafter that shares the weights of this target.

        If the drafters differ only in their weights, programs are shared too. Overrides of the
        previous drafter's keys do not apply to the new one.

        Args:
          drafter: Name of a strategy, or directory or hf:org/name of a drafter.
          *overrides: Overrides `key=value` of the drafter's keys, or of `decode`.
        Raises:
          UserError: The drafter is missing, damaged or does not fit, or an override concerns the
            target.
        """
        other = copy.copy(self)
        unrelated = [each for each in self._overrides if not each.startswith("drafter.")]
        other._overrides = (*unrelated, *models.overrides(None, drafter), *overrides)
        run = loader.load(self._path, other._overrides)
        if jobs.target_key(run) != jobs.target_key(self.config):
            raise errors.ConfigError(
                "with_drafter shares the target, so target, mesh, sharding_rules and dtype cannot "
                "be overridden; create another LLM"
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
        """Decodes prompts, in batches of `decode.batch_size`.

        Args:
          prompts: One text, or several prompts: each a text, token ids, or messages with "role" and
            "content". Texts go through the chat template if `prompts.chat` is true.
          sampling: Sampling parameters of all prompts; None for the config's.
        Returns:
          One completion per prompt, in the order of the prompts.
        Raises:
          InputError: A prompt is unusable or too long; no prompt is decoded then.
        """
        values = [prompts] if isinstance(prompts, str) else list(prompts)
        if not values:
            return []
        job, engine, batch = self._prepare(values, sampling)
        done: dict[int, requests.RequestOutput] = {}
        logprobs: dict[int, list[TokenLogprobs]] = {request.id: [] for request in batch}
        for event in decode(engine, batch):
            if isinstance(event, requests.RequestOutput):
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
        """Returns the answer to a conversation, formatted by the checkpoint's chat template.

        Args:
          messages: Messages with "role" and "content"; the last one is usually the user's.
          sampling: Sampling parameters; None for the config's.
        Raises:
          InputError: There is no chat template, it rejects these messages, or they are too long.
        """
        return self.generate([list(messages)], sampling)[0]

    def stream(self, prompt: prompts_lib.Value, sampling: Sampling | None = None) -> Stream:
        """Decodes one prompt piece by piece.

        >>> llm = LLM("configs/tiny_dflash.yml")
        >>> question = "Tom has 3 pens and finds 4 more. How many pens does Tom have?"
        >>> stream = llm.stream(question, Sampling(max_tokens=8))
        >>> text = "".join(piece.text for piece in stream)
        >>> text == stream.completion.text
        True

        Args:
          prompt: Text, token ids or messages, as for `generate`.
          sampling: Sampling parameters; None for the config's.
        Returns:
          An iterator of pieces, whose `completion` is set once it is exhausted.
        Raises:
          InputError: The prompt is unusable or too long; raised before the first piece.
        """
        stream = Stream(_pieces(prompt, *self._prepare([prompt], sampling)))
        self._streams.add(stream)
        return stream

    def update_weights(self, tree: Any, *, lora_alpha: float | None = None) -> None:
        """Replaces the target's weights in place, for instances that share them too.

        Only the program that writes the weights is compiled, at the first call.

        >>> llm = LLM("configs/tiny_dflash.yml")
        >>> from safetensors import numpy as safetensors
        >>> llm.update_weights(safetensors.load_file("dflash/assets/tiny_target/model.safetensors"))

        Args:
          tree: Weights of any dtype, on any devices, under the names of Hugging Face, Tunix or
            MaxText; see `weight_update.update`.
          lora_alpha: Numerator of the scale of LoRA parameters in the tree, which are merged.
        Raises:
          CheckpointError: The tree does not fit, or holds NaN. The old weights stay.
          InputError: A stream is being read, or an adapter is merged into the weights.
        """
        if any(stream.is_open for stream in self._streams):
            raise errors.InputError(
                "update_weights: an output is being streamed; read it to its end, or drop it"
            )
        if self.config.target.adapter is not None:
            raise errors.InputError(
                "update_weights: target.adapter is merged, which new weights would not have"
            )
        weight_update.update(self._job.target, tree, lora_alpha=lora_alpha)

    def _prepare(self, values: Sequence[prompts_lib.Value], sampling: Sampling | None):
        """Returns a job over these prompts, an engine with their programs, and their requests."""
        config, sampling = self.config, sampling or Sampling()
        decode_config = sampling.applied_to(config.decode)
        job = dataclasses.replace(
            self._job, config=dataclasses.replace(config, decode=decode_config)
        )
        vocab_size = job.target.arch.vocab_size
        encoded = prompts_lib.from_values(
            values, config.prompts, job.tokenizer, vocab_size=vocab_size
        )
        job = jobs.with_prompts(job, encoded)
        batch = sampling.requests(job.requests(encoded), lambda: self._vocabulary)
        for request in batch:
            requests.check_request(request, max_length=job.max_length, vocab_size=vocab_size)
        engine = self._engine
        if engine is None or not engine.has_room(job.max_length, len(job.stop_ids)):
            engine = self._engine = _roomy(job).engine()
        needs = {
            "grammars": any(request.is_masked for request in batch),
            "greedy": all(map(controls.is_greedy, batch)),
        }
        engine.compile((len(prompt.ids) for prompt in encoded), **needs)
        engine.time_cycles()
        return job, engine, batch

    @functools.cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary.of(self.tokenizer)


def _roomy(job: Job) -> Job:
    """Returns the job with room for longer prompts: the next power of two, if the target allows."""
    if job.config.decode.max_length is not None:
        return job
    positions = job.target.arch.max_position_embeddings
    length = max(_MIN_LENGTH, 1 << (job.max_length - 1).bit_length())
    return dataclasses.replace(job, max_length=max(job.max_length, min(length, positions)))


def _pieces(
    value: prompts_lib.Value, job: Job, engine: Engine, batch: Sequence[Request]
) -> Generator[Piece | Completion]:
    """Yields the pieces of a job's only prompt, then its completion."""
    (prompt,) = job.prompts
    words = IncrementalDecoder(job.tokenizer, prompt=prompt.ids)
    silent = frozenset(batch[0].stop_ids)
    logprobs: list[TokenLogprobs] = []
    for event in decode(engine, batch):
        if isinstance(event, requests.RequestOutput):
            tail = words.flush()
            if tail:
                yield Piece(tail, (), drafted=False)
            yield _completion(value, prompt, event, job.tokenizer, logprobs)
            return
        logprobs += event.logprobs
        begin = 0
        cycles = zip(event.accepted, event.acceptance_lengths, strict=True)
        for accepted, length in cycles if event.accepted else ((0, len(event.ids)),):
            middle, end = begin + accepted, begin + length
            for first, last, drafted in ((begin, middle, True), (middle, end, False)):
                ids = event.ids[first:last]
                if ids:
                    text = words.push(token for token in ids if token not in silent)
                    yield Piece(text, ids, drafted, event.logprobs[first:last])
            begin = end


def _completion(
    value: prompts_lib.Value,
    prompt: Prompt,
    completion: requests.RequestOutput,
    tokenizer: Tokenizer,
    logprobs: Sequence[TokenLogprobs],
) -> Completion:
    return Completion(
        prompt=value,
        prompt_token_ids=prompt.ids,
        text=decode_output(tokenizer, prompt.ids, completion.text_ids),
        token_ids=completion.output_ids,
        finish_reason=completion.finish_reason,
        acceptance_lengths=completion.acceptance_lengths,
        prefill_ms=completion.prefill_ms,
        decode_ms=completion.decode_ms,
        logprobs=tuple(logprobs),
    )
