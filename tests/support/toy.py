"""A model of a few hundred weights and endless batches, for tests of the training loop."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from dflash.config import schema
from dflash.layers.linear import Embedding, Linear
from dflash.parallel import parameters, sharding
from dflash.training import state as states
from dflash.training import step as steps_lib
from dflash.training.checkpoints import Checkpoints
from dflash.training.report import TrainReport
from dflash.training.trainer import LoopConfig, StepFunctions, Trainer

VOCAB, WIDTH, ROWS, LENGTH = 16, 16, 8, 8


class Toy(nnx.Module):
    """Predicts the next token from the last one."""

    def __init__(self, placed: sharding.Sharding):
        build = {"dtype": jnp.float32, "sharding": placed}
        self.embed = Embedding(VOCAB, WIDTH, **build)
        self.out = Linear(WIDTH, VOCAB, ("embed", "vocab"), **build)

    def loss(self, batch, key, noise):
        """Cross-entropy, times 1 + noise · a random number of the key."""
        logits = self.out(self.embed(batch["tokens"][:, :-1]))
        labels, mask = batch["tokens"][:, 1:], batch["loss_mask"][:, 1:]
        each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        each = each * (1 + noise * jax.random.uniform(key))
        weight = mask.sum()
        return (each * mask).sum() / weight, {"weight": weight.astype(jnp.float32)}


class Counting:
    """Batches in which each token follows the one before by a rule; `state` is their number."""

    def __init__(self, state=None, *, mine, poison_at=None):
        self._next = 0 if state is None else state["next"]
        self._mine, self._poison_at = list(mine), poison_at

    def __next__(self):
        rng = np.random.default_rng(self._next)
        first = rng.integers(0, VOCAB, (ROWS, 1))
        tokens = ((first + 3 * np.arange(LENGTH)) % VOCAB).astype(np.int32)
        mask = rng.random((ROWS, LENGTH)) < 0.8
        mask = mask.astype(np.float32)
        self._next += 1
        if self._next == self._poison_at:
            mask[0, 1] = np.nan
        return {"tokens": tokens[self._mine], "loss_mask": mask[self._mine]}

    def state(self):
        return {"next": self._next}


@dataclasses.dataclass
class Run:
    """A run of the loop on the toy model."""

    directory: pathlib.Path
    steps: int = 12
    mesh: tuple[int, int, int] = (1, 1, 1)
    accumulate_steps: int = 1
    checkpoint_every: int = 4
    evaluate_every: int = 0
    keep_last: int = 2
    poison_at: int | None = None
    scores: tuple[float, ...] = ()
    patience: int = 0
    goal: str = "tau"
    evaluation: str = "12 prompts"
    noise: float = 0.1

    def __post_init__(self):
        sizes = dict(zip(sharding.MESH_AXES, self.mesh, strict=False))
        self.sharding = sharding.make_sharding(sizes, schema.SHARDING_RULES)
        self.notes: list[str] = []
        self.exported: list[int] = []
        self.optimizer = optax.adamw(0.05)
        model = Toy(self.sharding)
        self.graph, self.abstract_params = states.split(model)
        self.like = states.abstract(self.abstract_params, self.optimizer, self.sharding)

    def fresh(self):
        model = Toy(self.sharding)
        parameters.initialize(model, jax.random.key(0))
        return states.create(states.split(model)[1], self.optimizer, 0, self.sharding)

    def step(self):
        def loss(params, frozen, batch, key):
            return nnx.merge(self.graph, params).loss(batch, key, self.noise)

        return steps_lib.make_train_step(
            loss, self.optimizer, lambda step: jnp.float32(0.05), dtype=jnp.dtype("float32"),
            accumulate_steps=self.accumulate_steps, sharding=self.sharding, state=self.like,
        )  # fmt: skip

    def go(self):
        """Trains, from a checkpoint in the directory if there is one; returns the outcome."""
        scores = iter(self.scores)
        train_step = self.step()
        functions = StepFunctions(
            train=lambda state, batch: train_step(state, (), batch),
            evaluate=lambda params: {self.goal: next(scores)},
            export=lambda params, step: self.exported.append(step),
        )
        self.directory.mkdir(parents=True, exist_ok=True)
        with Checkpoints(self.directory / "checkpoints", keep_last=self.keep_last) as checkpoints:
            found = checkpoints.restore(self.like, self.notes.append)
            state = found.state if found else self.fresh()
            metadata = found.metadata if found else {"data": None}
            self.started_at = found.step if found else 0
            config = LoopConfig(
                steps=self.steps, rows=ROWS, log_every=3, checkpoint_every=self.checkpoint_every,
                evaluate_every=self.evaluate_every, goal=self.goal, evaluation=self.evaluation,
                patience=self.patience,
            )  # fmt: skip
            mine = steps_lib.rows_of_process(self.sharding, ROWS)
            batches = Counting(metadata["data"], mine=mine, poison_at=self.poison_at)
            place = self.directory if jax.process_index() == 0 else None
            counts = {"steps": self.steps, "tokens_per_step": ROWS * LENGTH}
            with TrainReport(place, first_step=self.started_at, **counts) as report:
                trainer = Trainer(
                    config,
                    functions,
                    state=state,
                    step=self.started_at,
                    batches=batches,
                    sharding=self.sharding,
                    checkpoints=checkpoints,
                    metadata=metadata,
                    report=report,
                )
                outcome = trainer.run()
            self.kept = checkpoints.steps()
        return outcome


def arrays(outcome) -> dict[str, np.ndarray]:
    """The final state by name, on the host."""
    return {name: np.asarray(x) for name, x in states.flatten(outcome.state).items()}


def assert_identical(one, other) -> None:
    """Bit for bit."""
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype, name
        assert one[name].tobytes() == other[name].tobytes(), name
