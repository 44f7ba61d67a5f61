"""Training tasks, each with its models and loss: a target, or a drafter of a frozen target."""

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
from dflash.config.schema import FRESH, DrafterConfig
from dflash.config.train_schema import TrainRun
from dflash.drafters.base import Drafter
from dflash.layers.losses import TrainBatch
from dflash.loading import models
from dflash.loading.models import Source
from dflash.models.decoder import Decoder
from dflash.parallel import parameters
from dflash.parallel.sharding import Sharding
from dflash.training import start
from dflash.training import state as states
from dflash.training.state import Params
from dflash.training.step import Batch, Metrics

CountTokens = Callable[[], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Task(abc.ABC):
    """Models and loss of a run; the models are abstract until their weights are loaded.

    Attributes:
      target: Target in the compute dtype, frozen unless it is the learner.
      learner: Model that is trained, in float32.
      working: Same model as the learner, in the compute dtype.
      drafts: The learner is a drafter, so τ can be measured.
    """

    config: TrainRun
    target: Decoder
    target_source: Source
    learner: nnx.Module
    working: nnx.Module
    learner_source: Source

    drafts: ClassVar[bool]

    @property
    def dtype(self) -> jnp.dtype:
        """Compute dtype."""
        return jnp.dtype(self.config.train.dtype)

    @property
    def weights_ratio(self) -> float | None:
        """Bytes of weights read per decode cycle over bytes read per token of plain decoding.

        The numerator is a lower bound: target and drafter are read once. None if the learner is
        not a drafter.
        """
        if not self.drafts:
            return None
        target, drafter = (_weight_bytes(model) for model in (self.target, self.working))
        return (target + drafter) / target

    @property
    def from_scratch(self) -> bool:
        """Returns whether the learner starts from random weights."""
        return self.learner_source.directory is None

    def fresh_params(self) -> Params:
        """Returns the learner's initial float32 weights; raises CheckpointError if damaged."""
        if self.from_scratch:
            key = jax.random.fold_in(states.step_key_base(self.config.train.seed), 2**31)
            parameters.initialize(self.learner, key)
        else:
            models.load_weights(self.learner, self.learner_source)
        return states.split(self.learner)[1]

    @abc.abstractmethod
    def load_frozen(self, count_tokens: CountTokens) -> Params:
        """Loads or computes the arrays that the loss reads and that are not trained.

        Args:
          count_tokens: Returns the count of each token id as a label; see
            `Drafter.prepare_training`.
        """

    @abc.abstractmethod
    def abstract_frozen(self) -> Params:
        """Returns the shapes and shardings of the result of `load_frozen`."""

    @abc.abstractmethod
    def loss(
        self, params: Params, frozen: Params, batch: Batch, key: jax.Array
    ) -> tuple[jax.Array, Metrics]:
        """Returns the loss and the metrics of a batch; see `LossFunction`."""

    def export(self, params: Params, directory: pathlib.Path, companions) -> None:
        """Writes the learner's weights in the Hugging Face layout; see `checkpoint.save`."""
        nnx.update(self.learner, params)
        module, config = self.exported()
        checkpoint.save(
            module,
            directory,
            config,
            dtype=jnp.dtype(self.config.train.export_dtype),
            companions=companions,
        )

    @abc.abstractmethod
    def exported(self) -> tuple[nnx.Module, dict[str, Any]]:
        """Returns the module to export, with the learner's weights, and its config.json."""


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

    def exported(self) -> tuple[nnx.Module, dict[str, Any]]:
        return self.learner, type(self.learner).config_to_hf(self.learner.arch)


class DrafterTask(Task):
    """Training of a drafter by its strategy's loss, on features of the frozen target.

    The frozen arrays are {"target": the target's parameters, "drafter": the drafter's arrays that
    are not trained, mostly none}.
    """

    drafts = True

    def fresh_params(self) -> Params:
        """Returns the initial weights, once `load_frozen` has loaded the target's."""
        params = super().fresh_params()
        origin = self.config.drafter.initialize_from
        if origin != FRESH:
            start.copy(self.learner, self.target, origin)
            params = states.split(self.learner)[1]
        return params

    def load_frozen(self, count_tokens: CountTokens) -> Params:
        models.load_weights(self.target, self.target_source)
        if self.from_scratch:
            self.learner.prepare_training(count_tokens, self.target)
            parameters.fill_buffers(self.learner)
        elif jax.tree.leaves(states.untrained(self.learner)):
            models.load_weights(self.learner, self.learner_source)
        loaded, placeholders = (states.untrained(model) for model in (self.learner, self.working))
        cast = jax.tree.map(lambda x, like: x.astype(like.dtype), loaded, placeholders)
        nnx.update(self.working, cast)
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

    @property
    def feature_widths(self) -> dict[str, int]:
        """Width of each array of `features`."""
        width = self.target.arch.hidden_size
        widths = {"features": len(self.working.feature_layers) * width}
        return widths | ({"hidden": width} if self.config.loss.uses_target_hidden else {})

    @property
    def feature_bytes(self) -> int:
        """Bytes of `features` per token."""
        return sum(self.feature_widths.values()) * self.dtype.itemsize

    def features(self, frozen: Params, batch: Batch) -> Batch:
        """Returns the target's features of a batch, and its hidden states if the loss uses them."""
        target = nnx.merge(nnx.graphdef(self.target), frozen["target"])
        with jax.named_scope("target"):
            hidden, features = target.forward(
                batch["tokens"],
                batch["positions"],
                batch["segment_ids"],
                feature_layers=self.working.feature_layers,
            )
        outputs = {"features": features, "hidden": hidden}
        return {name: jax.lax.stop_gradient(outputs[name]) for name in self.feature_widths}

    def exported(self) -> tuple[nnx.Module, dict[str, Any]]:
        drafter = nnx.clone(self.learner)
        if drafter.exports_tables:
            drafter.tabulate(self.target)
        return drafter, type(drafter).config_to_hf(drafter.shape)


def make_task(config: TrainRun, sharding: Sharding, *, download: bool = True) -> Task:
    """Builds the models of a run."""
    target_source = models.find_target(config.target, download=download)

    def build_target(dtype: str) -> Decoder:
        return models.build_target(config.target, target_source, dtype=dtype, sharding=sharding)

    target = build_target(config.train.dtype)
    if config.task == "target":
        return TargetTask(
            config, target, target_source, build_target("float32"), target, target_source
        )
    source = models.find_drafter(config.drafter, download=download)

    def build_drafter(dtype: str, drafter: DrafterConfig = config.drafter) -> Drafter:
        return models.build_drafter(drafter, source, target.arch, dtype=dtype, sharding=sharding)

    learner = build_drafter("float32")
    if not parameters.count(learner):
        raise errors.ConfigError(f"drafter.name: {config.drafter.name!r} has no weights to train")
    _check_block_size(config, learner, build_drafter)
    if config.drafter.initialize_from != FRESH:
        start.check(learner, target, config.drafter.initialize_from, download=download)
    return DrafterTask(
        config, target, target_source, learner, build_drafter(config.train.dtype), source
    )


def _check_block_size(
    config: TrainRun, learner: Drafter, build_drafter: Callable[..., Drafter]
) -> None:
    if getattr(config.drafter, "block_size", None) is None:
        return
    unset = dataclasses.replace(config.drafter, block_size=None)
    trained = build_drafter("float32", unset).longest_path
    if learner.longest_path != trained:
        key = "drafter.architecture.block_size"
        source = key if config.drafter.checkpoint == models.RANDOM else "drafter.checkpoint"
        raise errors.ConfigError(
            f"drafter.block_size: {config.drafter.block_size}, but blocks of {trained} rows are "
            f"trained, by {source}; leave drafter.block_size out, and choose the trained size of "
            f"a new drafter by {key}"
        )


def _weight_bytes(model: nnx.Module) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
