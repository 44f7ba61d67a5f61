"""Training of the drafter on the policy's own rollouts, between two steps of a trainer.

The drafter changes no token of a rollout, so its training cannot change the policy's. It follows
the policy: each training runs the policy with its new weights over rollouts of the step before.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from flax import nnx

from dflash import errors
from dflash.config.rl_schema import UpkeepRun
from dflash.config.train_schema import TrainConfig, TrainRun
from dflash.llm import LLM
from dflash.loading import models, weights
from dflash.parallel import parameters
from dflash.training import state as states
from dflash.training import step as steps
from dflash.training.checkpoints import Checkpoints
from dflash.training.optimizer import make_optimizer, make_schedule
from dflash.training.tasks import DrafterTask

# Steps over which a schedule other than a constant one runs; a trainer's number is not known.
_TOTAL_STEPS = 10_000


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
          config: Options of the training.
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
        self.num_trainings = 0
        self._checkpoints = self._open_checkpoints()

    def train(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Trains the drafter on rollouts, and lets it draft with the new weights.

        Args:
          rollouts: Rollouts since the last training; the longest output may reach
            `decode.max_length`.
        Returns:
          Metrics of the last step, such as "loss"; empty without rollouts.
        """
        kept = [rollout for rollout in rollouts if len(rollout.output) > 1]
        if not kept:
            return {}
        config, metrics = self._config.train, {}
        rng = np.random.default_rng((config.seed, self.num_trainings))
        order = rng.permutation(np.arange(config.steps * config.batch_size) % len(kept))
        frozen = self._task.abstract_frozen()
        for chosen in order.reshape(config.steps, config.batch_size):
            batch = self._batch([kept[i] for i in chosen])
            self.state, metrics = self._step(self.state, frozen, batch)
        self.num_trainings += 1
        self._install()
        if self._checkpoints is not None:
            count = {"num_trainings": self.num_trainings}
            self._checkpoints.save(int(self.state.step), self.state, count, best=None)
        return {name: float(value) for name, value in jax.device_get(metrics).items()}

    def close(self) -> None:
        """Waits for the last checkpoint."""
        if self._checkpoints is not None:
            self._checkpoints.wait()
            self._checkpoints.close()

    def _batch(self, rollouts: Sequence[Rollout]) -> steps.Batch:
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
        """Copies the trained weights to the drafter that decodes."""
        working = self._task.working
        # Copies, since the next step donates the state.
        params = jax.tree.map(
            lambda x, like: jnp.array(x, like.dtype, copy=True),
            self.state.params,
            states.split(working)[1],
        )
        trained = nnx.merge(nnx.graphdef(working), params, states.untrained(working))
        weights.arrange(trained, self._sharding)
        nnx.update(self._llm.drafter, nnx.state(trained))

    def _open_checkpoints(self) -> Checkpoints | None:
        config = self._config.train
        if config.directory is None:
            return None
        checkpoints = Checkpoints(pathlib.Path(config.directory), keep_last=config.keep_last)
        found = checkpoints.restore(self.state, logging.warning)
        if found is not None:
            self.state, self.num_trainings = found.state, found.metadata["num_trainings"]
            self._install()
        return checkpoints
