"""Engines behind the server, one per decoding mode, and the facts about the served model."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping

import jax

from dflash import errors
from dflash.checkpoints.files import CONFIG
from dflash.checkpoints.safetensors_header import read_headers
from dflash.config.schema import RANDOM
from dflash.config.serve_schema import ServeRun
from dflash.inference.engine import Engine
from dflash.loading import models
from dflash.loading.job import Job
from dflash.runs.display import Display
from dflash.serving.completion_request import NUM_STOP_IDS
from dflash.serving.served_model import ServedModel, TokenNames
from dflash.text.chat_formats.table import format_of
from dflash.text.grammar import Vocabulary

DRAFTED, PLAIN = "drafted", "plain"  # Decoding modes: with the drafter and without.


class Backend:
    """Engines behind a server, and the facts about the model that they serve."""

    def __init__(self, job: Job, config: ServeRun, display: Display):
        """Creates the backend without loading anything."""
        self.config = config
        self._job, self._display = job, display

    def start(self, go_on: Callable[[], None]) -> Mapping[str, Engine]:
        """Loads the weights, and compiles all programs that any request may need.

        Args:
          go_on: Function that is called after each program; an exception from it ends the start.
        Returns:
          Engine of each decoding mode.
        Raises:
          CheckpointError: A checkpoint is damaged.
        """
        job, config = self._job, self.config
        with self._display.status("loading weights"):
            job.load_weights()
        stops = len(job.target.arch.eos_token_id) + len(config.decode.stop_ids) + NUM_STOP_IDS
        engines = {DRAFTED: job.engine(num_stop_ids=stops)}
        if config.serve.compare:
            replicas = job.target.sharding.size("pages")
            decode = dataclasses.replace(config.decode, batch_size=replicas, num_pages=None)
            alone = dataclasses.replace(job, config=dataclasses.replace(config, decode=decode))
            engines[PLAIN] = alone.without_drafting().engine(num_stop_ids=stops)
        for engine in engines.values():
            longest = engine.layout.max_length
            lengths = [1 << i for i in range(longest.bit_length())] + [longest]
            with self._display.compiling() as show:

                def progress(ready: int, total: int, show=show) -> None:
                    show(ready, total)
                    go_on()

                engine.compile(lengths, progress, grammars=self._takes_grammars)
            if engine.must_time_cycles:
                with self._display.status("timing cycles"):
                    engine.time_cycles()
        return engines

    def update_weights(self, path: str, engines: Mapping[str, Engine]) -> None:
        """Replaces the target's weights; the caches of schedulers then belong to the old ones.

        Args:
          path: Directory of a checkpoint in safetensors on this machine.
        Raises:
          InputError: There is no such directory, or there are several processes.
          CheckpointError: The checkpoint is damaged or does not fit. The old weights stay.
          ConfigError: Its config.json describes another target.
        """
        if jax.process_count() > 1:
            raise errors.InputError("several processes: not supported; start the server again")
        directory = pathlib.Path(path)
        if not directory.is_dir():
            raise errors.InputError(f"{path}: no such directory on the server's machine")
        if (directory / CONFIG).is_file():
            models.check_same_target(self._job.target, self.config.target, directory)
        tensors = read_headers(directory)
        tree = {
            name: tensor.read(tuple(slice(0, rows) for rows in tensor.shape[:1]))
            for name, tensor in tensors.items()
        }
        engines[DRAFTED].update_weights(tree)

    def vocabulary(self) -> Vocabulary:
        """Returns the vocabulary for grammars; raises InputError if they are off or impossible."""
        if not self.config.serve.grammars:
            raise errors.InputError("not supported by this server: serve.grammars is false")
        return self._vocabulary

    @property
    def _takes_grammars(self) -> bool:
        try:
            self.vocabulary()
        except errors.InputError:
            return False
        return True

    def model(self, engines: Mapping[str, Engine]) -> ServedModel:
        """Returns the facts about the model that requests depend on."""
        job, config, engine = self._job, self.config, engines[DRAFTED]
        chat_format = format_of(
            job.tokenizer.chat_template,
            tools=config.serve.tool_format,
            thinking=config.serve.reasoning,
        )
        if config.prompts.thinking and chat_format.has_unknown_reasoning:
            reason = "it is not known how this model writes its reasoning"
            raise errors.InputError(
                f"prompts.thinking: {reason}; serve.reasoning=none leaves it in the text"
            )
        ends = chat_format.end_ids(job.tokenizer.special_spellings)
        return ServedModel(
            name=config.model_name,
            root=config.target.checkpoint or RANDOM,
            drafter=config.drafter.name,
            tokenizer=job.tokenizer,
            names=TokenNames(job.tokenizer),
            vocabulary=self.vocabulary,
            decode=config.decode,
            eos_ids=(*job.target.arch.eos_token_id, *ends),
            vocab_size=job.target.arch.vocab_size,
            max_length=engine.layout.max_length,
            drafts=engine.block_sizes[-1] - 1,
            special_tokens=config.prompts.special_tokens,
            compares=config.serve.compare,
            shares_prefixes=config.serve.share_prefixes,
            chat_format=chat_format,
            adapters=config.serve.adapters,
        )

    @functools.cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary.of(self._job.tokenizer)
