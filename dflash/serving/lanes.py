"""From a checked job to what the server runs: an engine for each lane, and the model's facts."""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping
from typing import Any, Protocol

from dflash.checkpoints.assembly import Source
from dflash.config.serve_schema import ServeRun
from dflash.inference.engine import Engine
from dflash.models.decoder import Decoder
from dflash.runs.display import Display
from dflash.serving.ask import NUM_STOP_IDS, Model
from dflash.serving.engine_thread import DRAFTED, PLAIN
from dflash.serving.token_names import TokenNames
from dflash.text.grammar import Vocabulary
from dflash.text.tokenizer import Tokenizer


class Job(Protocol):
    """What is needed of `offline.job.Job`: models that were found and checked."""

    config: Any
    target: Decoder
    target_source: Source
    tokenizer: Tokenizer

    def load_weights(self) -> None:
        """Fills both models."""

    def engine(self, *, num_stop_ids: int) -> Engine:
        """An engine over them."""

    def without_drafting(self) -> "Job":
        """The same target without a drafter."""


def start(job: Job, config: ServeRun, display: Display) -> Mapping[str, Engine]:
    """Loads weights, and compiles all programs that any request may need.

    Args:
      job: checked; has room for the longest request.
      config: of the server.
      display: shows what takes time.
    Raises:
      CheckpointError: a checkpoint is damaged.
    """
    with display.status("loading weights"):
        job.load_weights()
    return compiled(job, config, display)


def compiled(job: Job, config: ServeRun, display: Display) -> Mapping[str, Engine]:
    """The engines of all lanes with their programs; see `start`.

    Args:
      job: its weights are in place.
      config: of the server.
      display: shows what takes time.
    """
    stops = len(job.target.arch.eos_token_id) + len(config.decode.stop_ids) + NUM_STOP_IDS
    engines = {DRAFTED: job.engine(num_stop_ids=stops)}
    if config.serve.compare:
        replicas = job.target.sharding.size("pages")
        decode = dataclasses.replace(config.decode, batch_size=replicas, num_pages=None)
        alone = dataclasses.replace(job, config=dataclasses.replace(config, decode=decode))
        engines[PLAIN] = alone.without_drafting().engine(num_stop_ids=stops)
    for engine in engines.values():
        longest = engine.layout.max_length
        with display.compiling() as progress:
            engine.compile([1 << i for i in range(longest.bit_length())] + [longest], progress)
    return engines


def model_of(job: Job, config: ServeRun, engines: Mapping[str, Engine]) -> Model:
    """The facts that requests need to know."""
    engine, root = engines[DRAFTED], config.target.checkpoint or "random"
    return Model(
        name=config.serve.model or pathlib.PurePath(root.removeprefix("hf:")).name,
        root=root,
        drafter=config.drafter.name,
        tokenizer=job.tokenizer,
        names=TokenNames(job.tokenizer),
        vocabulary=functools.cache(functools.partial(Vocabulary.of, job.tokenizer)),
        decode=config.decode,
        eos_ids=tuple(job.target.arch.eos_token_id),
        vocab_size=job.target.arch.vocab_size,
        max_length=engine.layout.max_length,
        drafts=None if len(engine.block_sizes) > 1 else engine.block_sizes[0] - 1,
        special_tokens=config.prompts.special_tokens,
        compares=config.serve.compare,
    )
