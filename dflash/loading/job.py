"""Preparation of a decode run: finds and builds models, reads prompts, and checks both.

Weights are allocated only by `load_weights`, so problems are found before checkpoints are read.
"""

import dataclasses
import datetime
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TextIO

import jax

from dflash import errors
from dflash.checkpoints import vocabulary
from dflash.checkpoints.lora import Adapter
from dflash.config import loader
from dflash.config.schema import (
    DecodeConfig,
    DecodeRun,
    DrafterConfig,
    PromptsConfig,
    TargetConfig,
)
from dflash.config.train_schema import DataConfig
from dflash.data import datasets
from dflash.data.example import Example
from dflash.drafters.base import Drafter
from dflash.inference.engine import NUM_STOP_IDS, Engine
from dflash.inference.overlap.engine import OverlappedEngine
from dflash.inference.request import Request, RequestSampling, max_length
from dflash.layers.attention import Attention
from dflash.layers.mlp import Mlp
from dflash.loading import adapters, decode_plan, models
from dflash.loading.models import Source
from dflash.models.decoder import Decoder
from dflash.parallel import agreement, distributed, sharding
from dflash.parallel.sharding import Sharding
from dflash.runs import shards
from dflash.runs.outputs import Record
from dflash.runs.shards import Shard
from dflash.storage import hub
from dflash.text import prompts, tokenizer_loading
from dflash.text.prompts import Prompt
from dflash.text.tokenizer import Tokenizer

_USUAL_LENGTH = 4096  # Default tokens per sequence.
Grader = Callable[..., bool | None]  # (text, *, finished)


@dataclasses.dataclass(frozen=True)
class Job:
    """Checked decode run: config, models and prompts.

    Attributes:
      target: Target; abstract until `load_weights`.
      drafter: Drafter; abstract until `load_weights`.
      prompts: All prompts; empty if a dry run cannot know them.
      max_length: Length of the longest sequence, prompt and output, in tokens.
      date: Date that chat templates print; None for today.
      shard: Part of the config's prompts that the job holds.
      adapters: Adapters that sequences choose among, by name; see `loading.adapters`.
      drafts: Whether cycles draft. Only an exact run holds a drafter that does not draft.
    """

    config: DecodeRun
    target: Decoder
    drafter: Drafter
    target_source: Source
    drafter_source: Source
    tokenizer: Tokenizer
    prompts: tuple[Prompt, ...]
    max_length: int
    date: datetime.date | None = None
    shard: Shard = shards.WHOLE
    adapters: Mapping[str, Adapter] = dataclasses.field(default_factory=dict)
    drafts: bool = True

    @property
    def drafter_sharding(self) -> Sharding:
        """Returns the placement of the drafter."""
        return _drafter_sharding(self.config.drafter, self.target)

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """Returns the devices of both models."""
        return tuple(dict.fromkeys((*self.target.sharding.devices, *self.drafter_sharding.devices)))

    @property
    def longest_path(self) -> int:
        """Returns the most tokens that a cycle can commit."""
        return self.drafter.longest_path - self.config.drafter.overlaps

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Returns the tokens that end a sequence, ascending."""
        eos = () if self.config.decode.ignore_eos else self.target.arch.eos_token_id
        return tuple(sorted({*eos, *self.config.decode.stop_ids}))

    def requests(self, prompts: Sequence[Prompt]) -> list[Request]:
        """Returns the engine's requests for some prompts."""
        decode = self.config.decode
        return [
            Request(
                prompt.index,
                prompt.ids,
                decode.max_new_tokens,
                RequestSampling.from_config(decode, prompt.index),
                self.stop_ids,
                decode.min_new_tokens,
            )
            for prompt in prompts
        ]

    def check_length(self, prompt: Prompt) -> None:
        """Raises InputError if a prompt and its output exceed the cache or the target's range."""
        decode, positions = self.config.decode, self.target.arch.max_position_embeddings
        length = len(prompt.ids) + decode.max_new_tokens
        sizes = f"{len(prompt.ids)} prompt tokens + decode.max_new_tokens = {length}"
        if decode.max_length is not None and length > decode.max_length:
            raise errors.InputError(
                f"{prompt.source}: {sizes}, but the cache holds decode.max_length = "
                f"{decode.max_length}; raise it, or shorten the prompt"
            )
        if length > positions:
            raise errors.InputError(
                f"{prompt.source}: {sizes}, but the target was made for "
                f"{positions} positions; shorten one of the two"
            )

    def follow(self, prompt: Prompt, turn: int, before: Record) -> Prompt:
        """Returns the prompt of a later turn; raises InputError if it is rejected or too long."""
        vocab_size = self.target.arch.vocab_size
        following = prompts.continued(
            prompt, turn, before.prompt, before.text, self.tokenizer, vocab_size=vocab_size
        )
        self.check_length(following)
        return following

    def grade(self, records: Mapping[int, Record]) -> dict[str, int]:
        """Returns how many final answers were "checked" and are "correct"; empty if none can be."""
        graders = self.shard.of(find_graders(self.config.prompts))
        if not graders:
            return {}
        marks = [
            grader(record.text, finished=record.finish_reason == "stop")
            for prompt, grader in zip(self.prompts, graders, strict=True)
            if (record := records.get(prompt.indices[-1])) is not None
        ]
        marks = [mark for mark in marks if mark is not None]
        return {"checked": len(marks), "correct": sum(marks)} if marks else {}

    def of_shard(self, shard: Shard) -> "Job":
        """Returns the job with only the prompts of a shard; they keep their indices."""
        return dataclasses.replace(self, prompts=shard.of(self.prompts), shard=shard)

    def load_weights(self) -> None:
        """Loads both models; raises CheckpointError if weights are damaged or do not fit."""
        self.load_target()
        self.load_drafter()

    def load_target(self) -> None:
        """Loads the weights of the target alone; see `load_weights`."""
        models.load(self.target, self.target_source, self.target.sharding)
        adapters.fill(self.target, tuple(self.adapters.values()))

    def load_drafter(self) -> None:
        """Loads the weights of the drafter alone, after the target's; see `load_weights`."""
        models.load(self.drafter, self.drafter_source, self.drafter_sharding)
        self.drafter.tabulate(self.target)

    def with_adapters(self, references: Mapping[str, str]) -> "Job":
        """Returns the job with adapters for its target; raises CheckpointError if one misfits."""
        return dataclasses.replace(self, adapters=adapters.declare(self.target, references))

    def with_drafter(self, config: DecodeRun) -> "Job":
        """Returns the job with the same prompts and target under another config.

        Args:
          config: Config with this job's target, mesh and dtype. Its drafter is built abstract.
        Raises:
          UserError: The drafter cannot be found or built, or does not fit the target.
        """
        source, drafter = _find_drafter(config.drafter, self.target, self.target_source)
        _check_drafter(config.decode, config.drafter, self.target, drafter)
        return dataclasses.replace(self, config=config, drafter=drafter, drafter_source=source)

    def without_drafting(self) -> "Job":
        """Returns the baseline job, whose drafter proposes nothing.

        That of an exact run has the same drafter, so that the same programs decode.
        """
        if self.config.decode.exact:
            return dataclasses.replace(self, drafts=False)
        return self.with_drafter(dataclasses.replace(self.config, drafter=DrafterConfig()))

    def with_room(self) -> "Job":
        """Returns the job with room for any prompts; raises ConfigError above the positions."""
        positions, length = self.target.arch.max_position_embeddings, self.config.decode.max_length
        if length is not None and length > positions:
            raise errors.ConfigError(
                f"decode.max_length: {length} is more than the {positions} positions that the "
                "target was made for"
            )
        return dataclasses.replace(self, max_length=length or min(positions, _USUAL_LENGTH))

    def engine(self, prompts: Sequence[Prompt] = (), *, num_stop_ids: int = NUM_STOP_IDS) -> Engine:
        """Returns an engine over the current models, with room for prompts of later turns, too."""
        longest = [max_length(self.requests(prompts))] if prompts else []
        sizes = {
            "max_length": max([self.max_length, *longest]),
            "num_stop_ids": max(num_stop_ids, len(self.stop_ids)),
        }
        parts, drafting = (self.target, self.drafter, self.config.decode), self.config.drafter
        if drafting.overlaps:
            options = {"fan_out": drafting.fan_out, "drafter_sharding": self.drafter_sharding}
            return OverlappedEngine(*parts, **options, **sizes)
        options = {"adaptive_blocks": drafting.adaptive, "divide_rows": drafting.divides_rows}
        engine = Engine(*parts, **options, **sizes)
        if not self.drafts:
            engine.decode_plainly()
        return engine

    def notes(self) -> list[str]:
        """Returns lines on settings that apply to a part of the run, or not at all."""
        lines = _overlap_notes(self.config.decode) if self.config.drafter.overlaps else []
        longest = self.drafter.longest_context
        if self.config.decode.prefix_cache and self.target.has_recurrent_state:
            lines.append(
                "decode.prefix_cache: off, because the target keeps recurrent state, which exists "
                "at the end of a sequence only; every prompt is computed in full"
            )
        decoder = getattr(getattr(self.drafter, "shape", None), "decoder", None)
        if self.config.target.rope_scaling and decoder and decoder.rope_scaling is None:
            lines.append(
                "target.rope_scaling: the drafter's positions stay unscaled, and it accepts less; "
                "set drafter.rope_scaling to the same"
            )
        if longest is not None and longest < self.max_length:
            lines.append(
                f"drafter.longest_context: of at most {self.max_length} tokens of a sequence, "
                f"those after the first {longest} are decoded plainly"
            )
        return lines

    def plan(self, **needs: bool) -> decode_plan.Plan:
        """Returns the plan of the run, whose weights are abstract: its memory and programs.

        Args:
          **needs: Options of `Engine.program_names`; by default those of the config's own requests.
        """
        self.drafter.tabulate(self.target)
        lengths = [len(prompt.ids) for prompt in self.prompts]
        lengths = lengths or [max(1, self.max_length - self.config.decode.max_new_tokens)]
        engine = self.engine()
        programs = engine.program_names(lengths, **(needs or {"greedy": engine.is_greedy}))
        return decode_plan.make_plan(engine, self.target, self.drafter, programs)


def target_key(config: DecodeRun) -> str:
    """Returns a key that is equal for targets with the same weights on the same devices."""
    alone = {"target": config.target, "mesh": config.mesh, "rules": config.sharding_rules}
    return loader.config_hash({**alone, "dtype": config.dtype})


def prepare(
    config: DecodeRun, *, stdin: TextIO, dry: bool = False, date: datetime.date | None = None
) -> Job:
    """Finds, builds, reads and checks everything that a run needs.

    Args:
      stdin: Stream to read prompts from if the config names none.
      date: Date of the run, which chat templates may print; None for today.
      dry: Prepare only a plan: use no device, download nothing, and do not wait for stdin.
    Raises:
      UserError: The config, a checkpoint or a prompt is unusable.
    """
    job = prepare_models(config, dry=dry, date=date)
    if dry and not _prompts_are_known(config.prompts, config.target, job.target_source):
        longest = config.decode.prefill_chunk + config.decode.max_new_tokens
        return dataclasses.replace(job, max_length=config.decode.max_length or longest)

    def read() -> list[Prompt]:
        return read_prompts(job, config.prompts, stdin=stdin)

    # With several processes, only the first one reads standard input and files.
    return with_prompts(job, read() if dry else distributed.compute_on_first(read, [Prompt]))


def prepare_models(
    config: DecodeRun, *, dry: bool = False, date: datetime.date | None = None
) -> Job:
    """Returns a job without prompts: the part of `prepare` that concerns models."""
    mesh = dataclasses.asdict(config.mesh)
    options = {"abstract": dry, "exact": config.decode.exact}
    placed = sharding.make_sharding(mesh, config.sharding_rules, **options)
    target_source = models.find_target(config.target, download=not dry)
    target = models.build_target(config.target, target_source, dtype=config.dtype, sharding=placed)
    drafter_source, drafter = _find_drafter(config.drafter, target, target_source, download=not dry)
    _check_drafter(config.decode, config.drafter, target, drafter)
    words = tokenizer_loading.for_target(
        target_source.directory, thinking=config.prompts.thinking, date=date
    )
    if not dry:
        agreement.check_same("tokenizer", words.fingerprint)
        agreement.check_same("commits of the hub's checkpoints", hub.commits)
    sources = target_source, drafter_source
    return Job(config, target, drafter, *sources, words, prompts=(), max_length=0, date=date)


def read_prompts(job: Job, source: PromptsConfig, *, stdin: TextIO) -> list[Prompt]:
    """Reads prompts from another source for the models of a job."""
    examples = find_examples(source)
    return prompts.read_prompts(
        source,
        job.tokenizer,
        vocab_size=job.target.arch.vocab_size,
        stdin=stdin,
        conversations=[example.opening for example in examples],
        later_turns=[example.later_turns for example in examples],
    )


def find_graders(source: PromptsConfig, examples: Sequence[Example] | None = None) -> list[Grader]:
    """Returns graders of final answers, one per prompt; empty if the data set has no answers.

    Args:
      examples: Result of `find_examples`; None to read the examples.
    Returns:
      Functions of the answer's text; they return None if there is no reference answer.
    """
    if source.dataset is None:
        return []
    dataset = datasets.find(source.dataset, DataConfig())
    if not dataset.has_answers:
        return []
    examples = find_examples(source) if examples is None else examples
    return [functools.partial(dataset.is_correct, example) for example in examples]


def with_prompts(job: Job, prompts: Sequence[Prompt]) -> Job:
    """Returns the job with these prompts; raises UserError if one, or a stop id, does not fit."""
    length = job.config.decode.max_length or max_length(job.requests(prompts))
    job = dataclasses.replace(job, prompts=tuple(prompts), max_length=length)
    for prompt in prompts:
        job.check_length(prompt)
    vocab_size = job.target.arch.vocab_size
    outside = [token for token in job.stop_ids if token >= vocab_size]
    if outside:
        raise errors.ConfigError(
            f"decode.stop_ids: {outside[0]} is outside the target's vocabulary of {vocab_size}"
        )
    return job


def _prompts_are_known(prompts: PromptsConfig, target: TargetConfig, source: Source) -> bool:
    from_stdin = not prompts.text and prompts.file is None and prompts.dataset is None
    without_tokenizer = source.directory is None and target.checkpoint != models.RANDOM
    return not from_stdin and not without_tokenizer


def find_examples(config: PromptsConfig) -> list[Example]:
    """Returns the examples behind a data set's prompts, see `datasets.task_examples`, or none."""
    if config.dataset is None:
        return []
    return datasets.task_examples(config.dataset, config.limit, raw_dir=config.raw_dir)


def _find_drafter(
    config: DrafterConfig, target: Decoder, target_source: Source, *, download: bool = True
) -> tuple[Source, Drafter]:
    """Finds and builds the drafter of a config, abstract; its tokens are those of the target."""
    source = models.find_drafter(config, download=download)
    placed, dtype = _drafter_sharding(config, target), target.dtype.name
    drafter = models.build_drafter(config, source, target.arch, dtype=dtype, sharding=placed)
    if target_source.directory and source.directory:
        vocabulary.check_same(target_source.directory, source.directory)
    return source, drafter


def _drafter_sharding(config: DrafterConfig, target: Decoder) -> Sharding:
    """Returns the drafter's placement: on the target's devices, or on devices of its own."""
    if not config.overlaps:
        return target.sharding
    return sharding.beside(target.sharding, config.devices)


def _check_drafter(
    decode: DecodeConfig, drafting: DrafterConfig, target: Decoder, drafter: Drafter
) -> None:
    """Raises ConfigError if a drafter does not draft what the run's way of decoding needs."""
    if decode.exact:
        _check_exact(target, drafter)
    if decode.verify != "coupled" and drafter.num_draft_tokens and not drafter.has_probs:
        raise errors.ConfigError(
            f"decode.verify: {decode.verify} weighs drafts by their probabilities, and "
            f"drafter.name={drafting.name} has none; use decode.verify=coupled"
        )
    if decode.lookup and drafter.drafts_trees:
        raise errors.ConfigError(
            f"decode.lookup: copies replace chains, and drafter.name={drafting.name} drafts "
            "trees; leave decode.lookup out"
        )
    if drafting.overlaps:
        _check_speculation(drafting.fan_out, target, drafter)


def _check_exact(target: Decoder, drafter: Drafter) -> None:
    """Raises ConfigError if bits of a model's rows depend on how they are grouped into blocks."""
    layers = [(layer.self_attn, layer.mlp) for layer in target.layers]
    if not all(isinstance(a, Attention) and isinstance(m, Mlp) for a, m in layers):
        raise errors.ConfigError(
            "decode.exact: for targets whose layers have attention and a dense MLP; layers with "
            "experts, latents or recurrent state add up rows in other orders; leave it out"
        )
    if drafter.drafts_trees:
        raise errors.ConfigError("decode.exact: for chains, not for trees; leave the tree out")


def _check_speculation(fan_out: int, target: Decoder, drafter: Drafter) -> None:
    """Raises ConfigError if a drafter cannot draft for the outcomes of a verification."""
    if drafter.num_draft_tokens < 2:
        raise errors.ConfigError(
            "drafter.overlap: ssd verifies all drafts but the last, and there is only one; draft "
            "more, or leave it out"
        )
    if fan_out >= target.arch.vocab_size:
        raise errors.ConfigError(
            f"drafter.fan_out: {fan_out} is not below the target's vocabulary of "
            f"{target.arch.vocab_size}; lower it"
        )


def _overlap_notes(decode: DecodeConfig) -> list[str]:
    """Returns lines on settings that have no effect on overlapped decoding."""
    keys = {
        "prefix_cache": "drafter.overlap=ssd does not support it",
        "partial_dispatches": "drafter.overlap=ssd computes all slots",
    }
    return [
        f"decode.{key}: off, because {why}" for key, why in keys.items() if getattr(decode, key)
    ]
