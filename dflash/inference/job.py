"""A decode run before it starts: models found and built, prompts read, everything checked.

Nothing here fills memory, so whatever is wrong with a run is found before its weights are read.
"""

import dataclasses
from collections.abc import Sequence
from typing import TextIO

from dflash import errors
from dflash.common import assembly, prompts, sharding, tokenizer
from dflash.common.assembly import Source
from dflash.common.chat_template import Messages
from dflash.common.prompts import Prompt
from dflash.config.schema import DecodeRun, PromptsConfig
from dflash.data import datasets
from dflash.drafters.base import Drafter
from dflash.inference import plan, scheduler
from dflash.inference.engine import Engine
from dflash.inference.scheduler import Request
from dflash.models.decoder import Decoder


@dataclasses.dataclass(frozen=True)
class Job:
    """What a run is about.

    Attributes:
      config: of the run.
      target: abstract until `load_weights`.
      drafter: likewise.
      target_source: where its weights come from.
      drafter_source: likewise.
      tokenizer: the target's.
      prompts: all of the run's; none where a dry run cannot know them.
      max_length: of the longest sequence, prompt and output, in tokens.
    """

    config: DecodeRun
    target: Decoder
    drafter: Drafter
    target_source: Source
    drafter_source: Source
    tokenizer: tokenizer.Tokenizer
    prompts: tuple[Prompt, ...]
    max_length: int

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a sequence."""
        eos = () if self.config.decode.ignore_eos else self.target.arch.eos_token_id
        return (*eos, *self.config.decode.stop_ids)

    def requests(self, prompts: Sequence[Prompt]) -> list[Request]:
        """Prompts as the engine takes them."""
        limit = self.config.decode.max_new_tokens
        return [Request(prompt.index, prompt.ids, limit) for prompt in prompts]

    def load_weights(self) -> None:
        """Fills both models.

        Raises:
          CheckpointError: a checkpoint is damaged, or does not fit.
        """
        assembly.load_weights(self.target, self.target_source)
        assembly.load_weights(self.drafter, self.drafter_source)

    def engine(self) -> Engine:
        """An engine over the models as they are now."""
        return Engine(
            self.target,
            self.drafter,
            self.config.decode,
            max_length=self.max_length,
            stop_ids=self.stop_ids,
        )

    def plan(self) -> plan.Plan:
        """What the run will take."""
        lengths = [len(prompt.ids) for prompt in self.prompts]
        lengths = lengths or [self.max_length - self.config.decode.max_new_tokens]
        return plan.make_plan(self.engine(), self.target, self.drafter, lengths)


def prepare(config: DecodeRun, *, stdin: TextIO, dry: bool = False) -> Job:
    """Finds, builds, reads and checks everything that a run needs.

    Args:
      config: of the run.
      stdin: read for prompts where the config names none.
      dry: for a plan only: touches no device, downloads nothing, and does not wait for stdin.
    Raises:
      UserError: whatever is wrong; see its subclasses.
    """
    mesh = dataclasses.asdict(config.mesh)
    placed = sharding.make_sharding(mesh, config.sharding_rules, abstract=dry)
    target_source = assembly.find_target(config.target, download=not dry)
    drafter_source = assembly.find_drafter(config.drafter, download=not dry)
    build = {"dtype": config.dtype, "sharding": placed}
    target = assembly.build_target(config.target, target_source, **build)
    drafter = assembly.build_drafter(config.drafter, drafter_source, target.arch, **build)
    words = tokenizer.ByteTokenizer()
    if target_source.directory is not None:
        words = tokenizer.load_tokenizer(
            target_source.directory, enable_thinking=config.prompts.thinking
        )
    job = Job(
        config, target, drafter, target_source, drafter_source, words, prompts=(), max_length=0
    )
    if dry and not _prompts_are_known(config, target_source):
        longest = config.decode.prefill_chunk + config.decode.max_new_tokens
        return dataclasses.replace(job, max_length=config.decode.max_length or longest)
    vocab_size = target.arch.vocab_size
    found = prompts.read_prompts(
        config.prompts,
        words,
        vocab_size=vocab_size,
        stdin=stdin,
        conversations=_conversations(config.prompts),
    )
    longest = scheduler.max_length(job.requests(found))
    job = dataclasses.replace(
        job, prompts=tuple(found), max_length=config.decode.max_length or longest
    )
    _check(job)
    return job


def _prompts_are_known(config: DecodeRun, source: Source) -> bool:
    named = config.prompts
    from_stdin = not named.text and named.file is None and named.dataset is None
    without_tokenizer = source.directory is None and config.target.checkpoint != assembly.RANDOM
    return not from_stdin and not without_tokenizer


def _conversations(config: PromptsConfig) -> list[Messages]:
    if config.dataset is None:
        return []
    return datasets.task_prompts(config.dataset, config.split, config.limit)


def _check(job: Job) -> None:
    """Raises InputError if a prompt is longer than the cache or the model goes."""
    arch = job.target.arch
    for prompt in job.prompts:
        length = len(prompt.ids) + job.config.decode.max_new_tokens
        sizes = f"{len(prompt.ids)} prompt tokens + decode.max_new_tokens = {length}"
        if length > job.max_length:
            raise errors.InputError(
                f"{prompt.source}: {sizes}, but the cache holds decode.max_length = "
                f"{job.max_length}; raise it, or shorten the prompt"
            )
        if length > arch.max_position_embeddings:
            raise errors.InputError(
                f"{prompt.source}: {sizes}, but the target was made for "
                f"{arch.max_position_embeddings} positions; shorten one of the two"
            )
    outside = [token for token in job.stop_ids if token >= arch.vocab_size]
    if outside:
        raise errors.ConfigError(
            f"decode.stop_ids: {outside[0]} is outside the target's vocabulary of {arch.vocab_size}"
        )
