"""What learns: a target, or a drafter against a frozen target. Both turn batches into a loss."""

import abc
import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash import errors
from dflash.checkpoints import assembly, checkpoint
from dflash.checkpoints.assembly import Source
from dflash.config.train_schema import TrainRun
from dflash.drafters.base import Drafter
from dflash.layers.train_batch import TrainBatch
from dflash.models.decoder import Decoder
from dflash.parallel import parameters
from dflash.parallel.sharding import Sharding
from dflash.training import state as states
from dflash.training.state import Params
from dflash.training.step import Batch, Metrics

CountTokens = Callable[[], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Task(abc.ABC):
    """The models of a run, abstract until `load`.

    Attributes:
      config: of the run.
      target: in the compute dtype; frozen, unless it is what learns.
      target_source: where its weights come from.
      learner: float32; what learns.
      working: the learner once more, in the compute dtype.
      learner_source: where its weights start.
    """

    config: TrainRun
    target: Decoder
    target_source: Source
    learner: nnx.Module
    working: nnx.Module
    learner_source: Source

    drafts: ClassVar[bool]  # whether what learns is a drafter, so that τ can be measured

    @property
    def dtype(self) -> jnp.dtype:
        """Of the computation."""
        return jnp.dtype(self.config.train.dtype)

    @property
    def from_scratch(self) -> bool:
        """Whether the learner begins with fresh weights."""
        return self.learner_source.directory is None

    def fresh_params(self) -> Params:
        """The learner's weights before the first step, in float32.

        Raises:
          CheckpointError: they come from a checkpoint, and that is damaged.
        """
        if self.from_scratch:
            key = jax.random.fold_in(states.step_key_base(self.config.train.seed), 2**31)
            parameters.initialize(self.learner, key)
        else:
            assembly.load_weights(self.learner, self.learner_source)
        return states.split(self.learner)[1]

    @abc.abstractmethod
    def load_frozen(self, count_tokens: CountTokens) -> Params:
        """Reads or makes what does not learn; the loss wants it.

        Args:
          count_tokens: see `Drafter.prepare_training`.
        """

    @abc.abstractmethod
    def abstract_frozen(self) -> Params:
        """Shapes and places of what `load_frozen` returns."""

    @abc.abstractmethod
    def loss(
        self, params: Params, frozen: Params, batch: Batch, key: jax.Array
    ) -> tuple[jax.Array, Metrics]:
        """The loss of a batch; see `LossFunction`."""

    def export(self, params: Params, directory: pathlib.Path, companions) -> None:
        """Writes the learner's weights in the Hugging Face layout; see `save_hf`."""
        nnx.update(self.learner, params)
        checkpoint.save_hf(
            self.learner,
            directory,
            self.hf_config(),
            dtype=jnp.dtype(self.config.train.export_dtype),
            companions=companions,
        )

    @abc.abstractmethod
    def hf_config(self) -> dict[str, Any]:
        """The config.json of what learns."""


class TargetTask(Task):
    """Next-token prediction."""

    drafts = False

    def load_frozen(self, count_tokens: CountTokens) -> Params:
        return ()

    def abstract_frozen(self) -> Params:
        return ()

    def loss(self, params, frozen, batch, key):
        model = nnx.merge(nnx.graphdef(self.working), params)
        with jax.named_scope("target"):
            return model.loss(TrainBatch(**batch), remat=self.config.train.remat)

    def hf_config(self) -> dict[str, Any]:
        return type(self.learner).config_to_hf(self.learner.arch)


class DrafterTask(Task):
    """A strategy's own loss, with features of the frozen target.

    What is frozen: {"target": its weights, "tables": of the drafter}.
    """

    drafts = True

    def load_frozen(self, count_tokens: CountTokens) -> Params:
        assembly.load_weights(self.target, self.target_source)
        if self.from_scratch:
            self.learner.prepare_training(count_tokens)
            parameters.fill_buffers(self.learner)
        elif jax.tree.leaves(states.tables(self.learner)):
            assembly.load_weights(self.learner, self.learner_source)
        nnx.update(self.working, states.tables(self.learner))
        return self.abstract_frozen()

    def abstract_frozen(self) -> Params:
        return {"target": states.split(self.target)[1], "tables": states.tables(self.learner)}

    def loss(self, params, frozen, batch, key):
        target = nnx.merge(nnx.graphdef(self.target), frozen["target"])
        if "features" not in batch:
            batch = batch | self.features(frozen, batch)
        drafter = nnx.merge(nnx.graphdef(self.working), params, frozen["tables"])
        with jax.named_scope("drafter"):
            return drafter.loss(
                TrainBatch(**batch), target, key, self.config.loss, remat=self.config.train.remat
            )

    def features(self, frozen: Params, batch: Batch) -> Batch:
        """What the drafter learns from beside the tokens: one forward of the target."""
        target = nnx.merge(nnx.graphdef(self.target), frozen["target"])
        with jax.named_scope("target"):
            hidden, features = target.forward(
                batch["tokens"],
                batch["positions"],
                batch["segment_ids"],
                feature_layers=self.working.feature_layers,
            )
        found = {"features": jax.lax.stop_gradient(features)}
        if self.config.loss.uses_target_hidden:
            found["hidden"] = jax.lax.stop_gradient(hidden)
        return found

    def hf_config(self) -> dict[str, Any]:
        return type(self.learner).config_to_hf(self.learner.shape)


def make_task(config: TrainRun, sharding: Sharding, *, download: bool = True) -> Task:
    """Finds and builds the models.

    Args:
      config: of the run.
      sharding: where they live.
      download: fetch checkpoints that are not on this machine.
    Raises:
      UserError: whatever does not fit.
    """
    target_source = assembly.find_target(config.target, download=download)

    def build_target(dtype: str) -> Decoder:
        return assembly.build_target(config.target, target_source, dtype=dtype, sharding=sharding)

    target = build_target(config.train.dtype)
    if config.task == "target":
        return TargetTask(
            config, target, target_source, build_target("float32"), target, target_source
        )
    source = assembly.find_drafter(config.drafter, download=download)

    def build_drafter(dtype: str) -> Drafter:
        return assembly.build_drafter(
            config.drafter, source, target.arch, dtype=dtype, sharding=sharding
        )

    learner = build_drafter("float32")
    if not parameters.count(learner):
        raise errors.ConfigError(f"drafter.name: {config.drafter.name!r} has no weights to train")
    return DrafterTask(
        config, target, target_source, learner, build_drafter(config.train.dtype), source
    )
