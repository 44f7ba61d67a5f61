"""Training tasks: a target, or a drafter against a frozen target. Each defines a loss."""

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
from dflash.checkpoints import checkpoint
from dflash.config.train_schema import TrainRun
from dflash.drafters.base import Drafter
from dflash.layers.train_batch import TrainBatch
from dflash.loading import models
from dflash.loading.models import Source
from dflash.models.decoder import Decoder
from dflash.parallel import parameters
from dflash.parallel.sharding import Sharding
from dflash.training import state as states
from dflash.training.state import Params
from dflash.training.step import Batch, Metrics

CountTokens = Callable[[], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Task(abc.ABC):
    """The models of a run, abstract until their weights are loaded.

    Attributes:
      config: the run's config.
      target: target in the compute dtype; frozen, unless it is the learner.
      target_source: source of its weights.
      learner: float32 model that is trained.
      working: the learner in the compute dtype.
      learner_source: source of its initial weights.
    """

    config: TrainRun
    target: Decoder
    target_source: Source
    learner: nnx.Module
    working: nnx.Module
    learner_source: Source

    drafts: ClassVar[bool]  # whether the learner is a drafter, so that τ can be measured

    @property
    def dtype(self) -> jnp.dtype:
        """The compute dtype."""
        return jnp.dtype(self.config.train.dtype)

    @property
    def weights_ratio(self) -> float | None:
        """Bytes of weights that a cycle reads at least, over those of a plain token.

        None where no drafter is trained.
        """
        if not self.drafts:
            return None
        target, drafter = (_weight_bytes(model) for model in (self.target, self.working))
        return (target + drafter) / target

    @property
    def from_scratch(self) -> bool:
        """Whether the learner starts from random weights."""
        return self.learner_source.directory is None

    def fresh_params(self) -> Params:
        """The learner's weights before the first step, in float32.

        Raises:
          CheckpointError: the checkpoint that they come from is damaged.
        """
        if self.from_scratch:
            key = jax.random.fold_in(states.step_key_base(self.config.train.seed), 2**31)
            parameters.initialize(self.learner, key)
        else:
            models.load_weights(self.learner, self.learner_source)
        return states.split(self.learner)[1]

    @abc.abstractmethod
    def load_frozen(self, count_tokens: CountTokens) -> Params:
        """Loads or makes the arrays that the loss needs and that are not trained.

        Args:
          count_tokens: see `Drafter.prepare_training`.
        """

    @abc.abstractmethod
    def abstract_frozen(self) -> Params:
        """Shapes and shardings of the result of `load_frozen`."""

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
        """The config.json of the learner."""


class TargetTask(Task):
    """Next-token prediction."""

    drafts = False

    def load_frozen(self, count_tokens: CountTokens) -> Params:
        return ()

    def abstract_frozen(self) -> Params:
        return ()

    def loss(self, params, frozen, batch, key):
        model = nnx.merge(nnx.graphdef(self.working), params)
        model.gather_head()
        with jax.named_scope("target"):
            return model.loss(TrainBatch(**batch), remat=self.config.train.remat)

    def hf_config(self) -> dict[str, Any]:
        return type(self.learner).config_to_hf(self.learner.arch)


class DrafterTask(Task):
    """The loss of a strategy, on features of the frozen target.

    Frozen arrays: {"target": its parameters, "drafter": those of the drafter, mostly none}.
    """

    drafts = True

    def load_frozen(self, count_tokens: CountTokens) -> Params:
        models.load_weights(self.target, self.target_source)
        if self.from_scratch:
            self.learner.prepare_training(count_tokens, self.target)
            parameters.fill_buffers(self.learner)
        elif jax.tree.leaves(states.untrained(self.learner)):
            models.load_weights(self.learner, self.learner_source)
        loaded, wanted = (states.untrained(model) for model in (self.learner, self.working))
        nnx.update(self.working, jax.tree.map(lambda x, like: x.astype(like.dtype), loaded, wanted))
        return self.abstract_frozen()

    def abstract_frozen(self) -> Params:
        target, drafter = states.split(self.target)[1], states.untrained(self.working)
        return {"target": target, "drafter": drafter}

    def loss(self, params, frozen, batch, key):
        target = nnx.merge(nnx.graphdef(self.target), frozen["target"])
        if "features" not in batch:
            batch = batch | self.features(frozen, batch)
        target.gather_head()
        drafter = nnx.merge(nnx.graphdef(self.working), params, frozen["drafter"])
        with jax.named_scope("drafter"):
            return drafter.loss(
                TrainBatch(**batch), target, key, self.config.loss, remat=self.config.train.remat
            )

    def features(self, frozen: Params, batch: Batch) -> Batch:
        """The target's features of a batch, and its final hidden states if the loss uses them."""
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
    """Builds the models.

    Args:
      config: the run's config.
      sharding: the run's mesh and rules.
      download: whether to fetch checkpoints that are not on this machine.
    Raises:
      UserError: the config and the checkpoints do not fit.
    """
    target_source = models.find_target(config.target, download=download)

    def build_target(dtype: str) -> Decoder:
        return models.build_target(config.target, target_source, dtype=dtype, sharding=sharding)

    target = build_target(config.train.dtype)
    if config.task == "target":
        return TargetTask(
            config, target, target_source, build_target("float32"), target, target_source
        )
    source = models.find_drafter(config.drafter, download=download)

    def build_drafter(dtype: str) -> Drafter:
        return models.build_drafter(
            config.drafter, source, target.arch, dtype=dtype, sharding=sharding
        )

    learner = build_drafter("float32")
    if not parameters.count(learner):
        raise errors.ConfigError(f"drafter.name: {config.drafter.name!r} has no weights to train")
    return DrafterTask(
        config, target, target_source, learner, build_drafter(config.train.dtype), source
    )


def _weight_bytes(model: nnx.Module) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
