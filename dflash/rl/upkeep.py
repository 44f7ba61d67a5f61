"""Training of the drafter on the policy's own rollouts, between two steps of a trainer.

The drafter changes no token of a rollout, so its training cannot change the policy's. It learns
from the policy's own outputs on its rollouts: those of the trainer's log-probability pass where
there was one, and else of a forward pass of its own. Both are computed with the weights that gave
the rollouts.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from flax import nnx

from dflash import errors
from dflash.config.train_schema import TrainConfig, TrainRun, UpkeepRun
from dflash.layers import losses
from dflash.layers.products import matmul_precision
from dflash.llm import LLM
from dflash.loading import models
from dflash.models.decoder import Decoder
from dflash.parallel import parameters
from dflash.training import state as states
from dflash.training import step as steps
from dflash.training.checkpoints import Checkpoints
from dflash.training.optimizer import make_optimizer, make_schedule
from dflash.training.step import Batch
from dflash.training.tasks import DrafterTask

# The policy's outputs of one rollout: "features" [T, C·D], and "hidden" [T, D] if the loss uses it.
Outputs = Mapping[str, jax.Array]

# Steps whose τ is averaged to tell a decay from the differences between prompts.
MEAN_STEPS = 4
# Steps over which a schedule other than a constant one runs; a trainer's number is not known.
_TOTAL_STEPS = 10_000


class Scores(NamedTuple):
    """Results of a pass over prompts [B, P] with their completions [B, T].

    Attributes:
      logps: Log-probabilities of the completions' tokens, float32 [B, T].
      outputs: The policy's outputs of all P + T rows: "features" [B, P + T, C·D] and "hidden"
        [B, P + T, D]. Empty if no features are wanted.
    """

    logps: jax.Array
    outputs: dict[str, jax.Array]


class TokenLogps:
    """Program that scores the tokens of padded completions."""

    def __init__(self, target: Decoder, feature_layers: tuple[int, ...] = ()):
        """Creates the program of a target; its weights may be updated."""
        self._graph, self._params = nnx.graphdef(target), nnx.state(target)
        self._feature_layers = feature_layers

    def __call__(
        self,
        prompts: jax.Array,
        completions: jax.Array,
        pad_id: int,
        temperature: float = 1.0,
    ) -> Scores:
        """Scores completions.

        Args:
          prompts: int32 [B, P]; padded on the left.
          completions: int32 [B, T]; padded on the right. Padding gets meaningless numbers.
          temperature: Divisor of the logits; 0 counts as 1.
        """
        how = self._feature_layers, pad_id, float(temperature or 1.0)
        return _score(self._graph, self._params, prompts, completions, *how)


@functools.partial(jax.jit, static_argnums=(0, 4, 5, 6))
def _score(
    graph, params, prompts, completions, feature_layers, pad_id: int, temperature: float
) -> Scores:
    target = nnx.merge(graph, params)
    with jax.default_matmul_precision(matmul_precision(target.dtype)):
        rows = pack(prompts, completions, pad_id)
        hidden, features = target.forward(*rows, feature_layers=feature_layers)

        def unembed(rows):
            return target.unembed(rows) / temperature

        predicting = hidden[:, prompts.shape[1] - 1 : -1]
        logps = -losses.score_tokens(predicting, completions, unembed).objective
        return Scores(logps, {"features": features, "hidden": hidden} if feature_layers else {})


def pack(
    prompts: jax.Array, completions: jax.Array, pad_id: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns tokens, positions and segment ids of prompts with their completions, [B, P + T]."""
    tokens = jnp.concatenate([prompts, completions], axis=1)
    is_token = tokens != pad_id
    positions = jnp.maximum(jnp.cumsum(is_token, axis=1) - 1, 0)
    return tokens, positions, is_token.astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Rollout:
    """Token ids of a prompt and of the output that the policy gave."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]


class Upkeep:
    """Training state of a drafter, and the program that trains it."""

    def __init__(self, llm: LLM, config: UpkeepRun):
        """Loads the drafter's weights in float32, or the state of the last checkpoint.

        Args:
          llm: Target and drafter that decode; the drafter's weights are replaced after training.
        Raises:
          ConfigError: The drafter has no weights to train.
          WorkdirError: The checkpoints cannot be read.
        """
        self._llm, self._config = llm, config
        drafter, source = llm.config.drafter, models.find_drafter(llm.config.drafter)
        self._sharding = llm.target.sharding

        def build(dtype: str) -> Any:
            arch = llm.target.arch
            return models.build_drafter(drafter, source, arch, dtype=dtype, sharding=self._sharding)

        learner, working = build("float32"), build(llm.config.dtype)
        if not parameters.count(learner):
            raise errors.ConfigError(
                f"train.every: {config.train.every}, but drafter.name={drafter.name} has no "
                "weights to train; leave it out"
            )
        run = TrainRun(
            loss=config.loss,
            optimizer=config.optimizer,
            train=TrainConfig(dtype=llm.config.dtype, seed=config.train.seed),
        )
        self._task = DrafterTask(run, llm.target, source, learner, working, source)
        models.load_weights(learner, source)
        fixed, like = states.untrained(learner), states.untrained(working)
        nnx.update(working, jax.tree.map(lambda x, like: x.astype(like.dtype), fixed, like))
        optimizer = make_optimizer(config.optimizer, _TOTAL_STEPS)
        params = states.split(learner)[1]
        self.state = states.create(params, optimizer, config.train.seed, self._sharding)
        self._step = steps.make_train_step(
            self._task.loss,
            optimizer,
            make_schedule(config.optimizer, _TOTAL_STEPS),
            dtype=jnp.dtype(llm.config.dtype),
            accumulate_steps=1,
            sharding=self._sharding,
            state=states.abstract(params, optimizer, self._sharding),
        )
        self._features = steps.make_feature_step(
            self._task.features, dtype=jnp.dtype(llm.config.dtype)
        )
        self._scored: dict[Rollout, Outputs] = {}  # Since the last training, by the trainer.
        self._recent: dict[Rollout, Outputs] = {}  # Of the last training.
        self.num_trainings = 0
        self._checkpoints = self._open_checkpoints()

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Layers of the target whose outputs the drafter reads."""
        return self._task.working.feature_layers

    @property
    def num_rows(self) -> int:
        """Number of rollouts that a training takes, counted as often as they are taken."""
        return self._config.train.steps * self._config.train.batch_size

    def keep(self, prompts: jax.Array, completions: jax.Array, pad_id: int, outputs: Batch) -> None:
        """Keeps the outputs of a log-probability pass for the next training.

        Outputs of rollouts beyond those that a training takes are dropped.

        Args:
          prompts: int32 [B, P]; padded on the left.
          completions: int32 [B, T]; padded on the right.
          outputs: Policy's "features" and "hidden" of all rows, each [B, P + T, …].
        """
        length = self._llm.config.decode.max_length
        starts = np.argmax(np.asarray(prompts) != pad_id, axis=1)
        names = self._task.feature_widths
        for i, (prompt, completion) in enumerate(
            zip(np.asarray(prompts), np.asarray(completions), strict=True)
        ):
            if len(self._scored) == self.num_rows:
                return
            end = len(completion) - np.argmax(completion[::-1] != pad_id)
            rollout = Rollout(tuple(prompt[starts[i] :].tolist()), tuple(completion[:end].tolist()))
            self._scored[rollout] = {
                name: _window(outputs[name], i, starts[i], length) for name in names
            }

    def train(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Trains the drafter on the latest rollouts, and lets it draft with the new weights.

        If these are fewer than `train.steps` × `train.batch_size`, those of earlier trainings are
        trained on again, with the outputs that they had: a few rollouts teach mostly their noise.

        Args:
          rollouts: Rollouts since the last training; the longest output may reach
            `decode.max_length`.
        Returns:
          Metrics of the last step, such as "loss"; "rollouts", the number of rollouts trained on;
          and "reused", the fraction of the new ones whose outputs were kept from a log-probability
          pass. Empty without rollouts.
        """
        new = [rollout for rollout in rollouts if len(rollout.output) > 1]
        if not new:
            return {}
        config, metrics, count = self._config.train, {}, self.num_rows
        known = [rollout for rollout in new if rollout in self._scored]
        new = (known if len(known) >= min(count, len(new)) else new)[-count:]
        reused = sum(rollout in self._scored for rollout in new) / len(new)
        outputs = self._recent | self._outputs_of(new)
        usable = list(outputs)[-count:]
        self._recent, self._scored = {rollout: outputs[rollout] for rollout in usable}, {}
        rng = np.random.default_rng((config.seed, self.num_trainings))
        chosen = [usable[i] for i in rng.permutation(np.arange(count) % len(usable))]
        frozen = self._task.abstract_frozen()
        for rows in self._batches(chosen):
            batch = self._batch(rows) | self._stacked(rows)
            self.state, metrics = self._step(self.state, frozen, batch)
        self.num_trainings += 1
        self._install()
        if self._checkpoints is not None:
            metadata = {"num_trainings": self.num_trainings}
            self._checkpoints.save(int(self.state.step), self.state, metadata, best=None)
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        return values | {"rollouts": len(usable), "reused": reused}

    def close(self) -> None:
        """Waits for the last checkpoint."""
        if self._checkpoints is not None:
            self._checkpoints.wait()
            self._checkpoints.close()

    def _outputs_of(self, rollouts: Sequence[Rollout]) -> dict[Rollout, Outputs]:
        """Returns the policy's outputs of rollouts; computes those of which none were kept."""
        known = {rollout: self._scored[rollout] for rollout in rollouts if rollout in self._scored}
        missing = [rollout for rollout in rollouts if rollout not in known]
        frozen = self._task.abstract_frozen()
        for rows in self._batches(missing):
            outputs = self._features(frozen, self._batch(rows))
            for i, rollout in enumerate(rows):
                known[rollout] = {name: array[i] for name, array in outputs.items()}
        return known

    def _stacked(self, rollouts: Sequence[Rollout]) -> Batch:
        rows = [self._recent[rollout] for rollout in rollouts]
        stacked = {name: jnp.stack([row[name] for row in rows]) for name in rows[0]}
        axes = "batch", None, None
        return {
            name: jax.device_put(array, self._sharding.named(array.shape, axes))
            for name, array in stacked.items()
        }

    def _batches(self, rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
        """Splits rollouts into batches; the last one is filled up with its first rollout."""
        size = self._config.train.batch_size
        batches = [list(rollouts[i : i + size]) for i in range(0, len(rollouts), size)]
        return [batch + batch[:1] * (size - len(batch)) for batch in batches]

    def _batch(self, rollouts: Sequence[Rollout]) -> Batch:
        """Returns one rollout per row, of the longest length, so that all batches are alike."""
        shape = len(rollouts), self._llm.config.decode.max_length
        arrays = {
            name: np.zeros(shape, np.int32)
            for name in ("tokens", "positions", "segment_ids", "loss_mask")
        }
        arrays["positions"][:] = np.arange(shape[1])
        for row, rollout in enumerate(rollouts):
            ids = (*rollout.prompt, *rollout.output)[: shape[1]]
            arrays["tokens"][row, : len(ids)] = ids
            arrays["segment_ids"][row, : len(ids)] = 1
            arrays["loss_mask"][row, len(rollout.prompt) : len(ids)] = 1
        return steps.place(arrays, self._sharding, len(rollouts))

    def _install(self) -> None:
        working = self._task.working
        # Copies, since the next step donates the state.
        params = jax.tree.map(
            lambda x, like: jnp.array(x, like.dtype, copy=True),
            self.state.params,
            states.split(working)[1],
        )
        trained = nnx.merge(nnx.graphdef(working), params, states.untrained(working))
        trained.tabulate(self._llm.target)
        models.arrange(trained, self._sharding)
        nnx.update(self._llm.drafter, nnx.state(trained))

    def _open_checkpoints(self) -> Checkpoints | None:
        config = self._config.train
        if config.directory is None:
            return None
        checkpoints = Checkpoints(pathlib.Path(config.directory), keep_last=config.keep_last)
        restored = checkpoints.restore(self.state, logging.warning)
        if restored is not None:
            self.state, self.num_trainings = restored.state, restored.metadata["num_trainings"]
            self._install()
        return checkpoints


def has_fallen(taus: Sequence[float], below: float) -> bool:
    """Returns whether τ has fallen, so that training is due; see `UpkeepConfig.below`."""
    if below > 1:
        return True
    count = len(taus) - MEAN_STEPS + 1
    means = [sum(taus[i : i + MEAN_STEPS]) / MEAN_STEPS for i in range(count)]
    return bool(means) and means[-1] < below * max(means)


@functools.partial(jax.jit, static_argnums=3)
def _window(array: jax.Array, row: int, start: int, length: int) -> jax.Array:
    """Returns rows `start` to `start + length` of array[row], [length, …]; padded with the last."""
    return jnp.take(array[row], start + jnp.arange(length), axis=0, mode="clip")
