"""GRPO with Tunix on the embedded tiny family, with three kinds of rollouts.

The policy learns to solve word problems in fewer words. Rollouts are decoded without a drafter, by
a frozen drafter, and by one that is trained on each step's rollouts. All three give the same
rewards and the same final weights, bit for bit; only the time of a step differs.

    pip install 'dflash-jax[rl]'
    python examples/grpo_tunix.py /tmp/grpo --steps=20
    python examples/grpo_tunix.py /tmp/grpo --compare=12

Writes results.json and three plots to the directory. Two CPU cores need about ten minutes.
"""

import argparse
import functools
import hashlib
import json
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from matplotlib import pyplot as plt
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.qwen3 import model as qwen3
from tunix.models.qwen3 import params as qwen3_params
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig

from dflash.checkpoints import checkpoint
from dflash.config.train_schema import DataConfig
from dflash.data import datasets
from dflash.rl import DFlashRollout
from dflash.rl.rollout import RolloutStats
from dflash.text.tokenizer_loading import load_tokenizer

TARGET, DRAFTER = "assets/tiny_target", "assets/tiny_dflash2"
TRAINED = {"every": 1, "steps": 4, "batch_size": 4}
# Eight of the sixteen trained rows: with four sequences, two CPU cores are busy before the others.
DFLASH = {"name": "dflash2", "checkpoint": DRAFTER, "block_size": 8, "short_pass": True}
VARIANTS = {
    "plain": {"drafter": {"name": "none"}},
    "frozen": {"drafter": DFLASH},
    "kept up": {"drafter": DFLASH, "train": TRAINED, "loss": {"num_anchors": 8}},
}
LABELS = {"plain": "no drafter", "frozen": "frozen drafter", "kept up": "drafter kept up"}
PROMPTS_PER_STEP, GENERATIONS = 1, 4
PROMPT_TOKENS, OUTPUT_TOKENS, TEMPERATURE = 64, 96, 1.5
PAD, END = 0, 2


class ChatTokenizer:
    """Tokenizer of the tiny family under Tunix's names; a prompt is a user's message."""

    def __init__(self):
        self._tokenizer = load_tokenizer(checkpoint.resolve(TARGET))

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a conversation that begins with this message."""
        return list(self._tokenizer.encode_chat([{"role": "user", "content": text}]))

    def decode(self, ids) -> str:
        """Returns the text of token ids."""
        return self._tokenizer.decode(list(ids))

    def bos_id(self) -> int:
        """Returns 0: the template needs no further token of begin."""
        return 0

    def eos_id(self) -> int:
        """Returns the token that ends an answer."""
        return END

    def pad_id(self) -> int:
        """Returns a token that the policy never gives."""
        return PAD


def load_policy(mesh: jax.sharding.Mesh) -> qwen3.Qwen3:
    """Returns the tiny target as a model of Tunix."""
    directory = checkpoint.resolve(TARGET)
    hf = checkpoint.read_config(directory)
    # Tunix 0.1.7 ignores the config's rope_theta and rotates with the default of this function.
    original = getattr(qwen3.apply_rope, "func", qwen3.apply_rope)
    qwen3.apply_rope = functools.partial(original, rope_theta=hf["rope_theta"])
    config = qwen3.ModelConfig(
        num_layers=hf["num_hidden_layers"],
        vocab_size=hf["vocab_size"],
        embed_dim=hf["hidden_size"],
        hidden_dim=hf["intermediate_size"],
        num_heads=hf["num_attention_heads"],
        head_dim=hf["head_dim"],
        num_kv_heads=hf["num_key_value_heads"],
        rope_theta=int(hf["rope_theta"]),
        norm_eps=hf["rms_norm_eps"],
        use_tied_embedding=hf["tie_word_embeddings"],
    )
    return qwen3_params.create_model_from_safe_tensors(
        str(directory), config, mesh, dtype=jnp.float32
    )


def make_batches(steps: int) -> list[dict[str, list]]:
    """Returns the prompts of each step, with their places among the examples."""
    examples = datasets.task_examples("math", limit=steps * PROMPTS_PER_STEP)
    batches = []
    for begin in range(0, len(examples), PROMPTS_PER_STEP):
        chosen = range(begin, begin + PROMPTS_PER_STEP)
        texts = [examples[i].opening[0]["content"] for i in chosen]
        batches.append({"prompts": np.array(texts), "place": np.array(chosen)})
    return batches


class Reward:
    """Reward of an answer: 1 if it is correct, less 1 for every 600 characters."""

    def __init__(self, steps: int):
        self._dataset = datasets.find("math", DataConfig())
        self._examples = datasets.task_examples("math", limit=steps * PROMPTS_PER_STEP)
        self.by_step: list[list[float]] = []

    def score(self, prompts, completions, place, **kwargs) -> list[float]:
        """Returns the reward of each completion."""
        rewards = []
        for i, text in zip(place, completions, strict=True):
            correct = self._dataset.is_correct(self._examples[int(i)], text, finished=True)
            rewards.append(float(bool(correct)) - len(text) / 600)
        self.by_step.append(rewards)
        return rewards


def train(options: dict, steps: int, learning_rate: float) -> dict:
    """Trains the policy with rollouts of one kind; returns what was measured."""
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    actor, reward = load_policy(mesh), Reward(steps)
    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
    config = rl_cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys(roles, mesh),
        rollout_engine=functools.partial(DFlashRollout, dflash=options),
        training_config=rl_cluster.RLTrainingConfig(
            actor_optimizer=optax.adamw(learning_rate, b2=0.95),
            eval_every_n_steps=10**6,
            max_steps=steps,
            mini_batch_size=PROMPTS_PER_STEP,
            train_micro_batch_size=PROMPTS_PER_STEP,
        ),
        rollout_config=rollout_config(),
    )
    cluster = rl_cluster.RLCluster(actor=actor, tokenizer=ChatTokenizer(), cluster_config=config)
    learner = GRPOLearner(
        rl_cluster=cluster,
        algo_config=GRPOConfig(num_generations=GENERATIONS, beta=0.0),
        reward_fns=reward.score,
        metric_fns=[cluster.rollout.metrics],
    )
    learner.train(make_batches(steps))
    history = cluster.rollout.history
    digest = hashlib.sha256()
    for _, leaf in nnx.to_flat_state(nnx.state(actor, nnx.Param)):
        digest.update(np.asarray(leaf.get_value()).tobytes())
    return {
        "rewards": reward.by_step,
        "weights": digest.hexdigest(),
        "tau": [step.tau for step in history],
        "tokens": [step.tokens for step in history],
        "rollout_s": [step.seconds for step in history],
        "drafter_s": [step.training_seconds for step in history],
        "step_s": [step.step_seconds for step in history],
    }


def compare(common: dict, rounds: int) -> dict[str, np.ndarray]:
    """Times the first policy's rollouts, without a drafter and with one, in turns.

    They are those of the steps of a run whose policy never changes; τ too is printed.

    Returns:
      Seconds and seconds of processor time of each round, [rounds, 2], by kind of rollouts.
    """
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    actor, words, config = load_policy(mesh), TokenizerAdapter(ChatTokenizer()), rollout_config()
    engines = {
        name: DFlashRollout(actor, words, mesh, config, dflash=common | VARIANTS[name])
        for name in ("plain", "frozen")
    }
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    for batch in make_batches(rounds):
        prompts = [str(text) for text in batch["prompts"] for _ in range(GENERATIONS)]
        texts = []
        for name, engine in engines.items():
            begin = time.perf_counter(), time.process_time()
            texts.append(engine.generate(prompts, config).text)
            end = time.perf_counter(), time.process_time()
            seconds[name].append((end[0] - begin[0], end[1] - begin[1]))
        assert texts[0] == texts[1]
        last = {name: np.round(values[-1], 2).tolist() for name, values in seconds.items()}
        print(f"tau {engines['frozen'].stats.tau:.2f}", last, flush=True)
        engines["frozen"].stats = RolloutStats()
    # The first ones compile.
    return {name: np.array(values[1:]) for name, values in seconds.items()}


def rollout_config() -> RolloutConfig:
    """Returns the lengths and the sampling of the rollouts."""
    return RolloutConfig(
        max_prompt_length=PROMPT_TOKENS,
        max_tokens_to_generate=OUTPUT_TOKENS,
        temperature=TEMPERATURE,
        seed=0,
    )


def plot(results: dict[str, dict], directory: pathlib.Path) -> None:
    """Writes the plots: seconds per step by phase, τ by step, reward by step."""
    figure, axes = plt.subplots(figsize=(6, 3.5))
    bottom = np.zeros(len(results))
    medians = {name: phases(result) for name, result in results.items()}
    for phase in ("rollout", "drafter", "rest"):
        heights = [medians[name][phase] for name in results]
        axes.bar([LABELS[name] for name in results], heights, bottom=bottom, label=phase)
        bottom += heights
    axes.set_ylabel("seconds per step (median of the last five)")
    axes.legend(["rollout", "training the drafter", "training the policy, reward"])
    _save(figure, directory / "rl_seconds.png")
    for key, label, file in (("tau", "τ", "rl_tau.png"), ("rewards", "reward", "rl_reward.png")):
        figure, axes = plt.subplots(figsize=(6, 3.5))
        for style, (name, result) in zip(("-", "--", ":"), results.items(), strict=False):
            values = [np.mean(value) for value in result[key]]
            axes.plot(range(1, len(values) + 1), values, style, label=LABELS[name])
        axes.set_xlabel("step")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_ylabel(f"mean {label}")
        axes.legend()
        _save(figure, directory / file)


def report(name: str, result: dict) -> None:
    """Prints the phases of a run, the drafter's share of a step, and the weights' hash."""
    medians = phases(result)
    share = medians["drafter"] / sum(medians.values())
    seconds = {phase: round(value, 2) for phase, value in medians.items()}
    print(f"{name}: seconds per step {seconds}, training the drafter {share:.0%},", end=" ")
    print(f"weights {result['weights'][:12]}", flush=True)


def phases(result: dict) -> dict[str, float]:
    """Returns the median seconds per step of each phase, of the last five steps.

    Earlier steps compile, and the drafter is trained only once τ has fallen.
    """
    step, rollout, drafter = (
        np.array(result[f"{name}_s"][-5:]) for name in ("step", "rollout", "drafter")
    )
    parts = {"rollout": rollout, "drafter": drafter, "rest": step - rollout - drafter}
    return {name: float(np.median(values)) for name, values in parts.items()}


def _save(figure, path: pathlib.Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    """Runs the variants one after the other, compares them, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--learning_rate", type=float, default=5e-4)
    parser.add_argument("--compare", type=int, metavar="ROUNDS", help="only time rollouts in turns")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    args = parser.parse_args()
    args.directory.mkdir(parents=True, exist_ok=True)
    common = {
        "target": {"checkpoint": TARGET},
        "dtype": "float32",
        "decode": {"batch_size": PROMPTS_PER_STEP * GENERATIONS, "page_size": 16},
    }
    if args.compare:
        times = compare(common, args.compare)
        time_ratio, processor_ratio = np.median(times["plain"] / times["frozen"], axis=0)
        print(f"plain / frozen: time {time_ratio:.2f}, processor time {processor_ratio:.2f}")
        return
    results = {}
    for name in args.variants:
        results[name] = train(common | VARIANTS[name], args.steps, args.learning_rate)
        report(name, results[name])
        (args.directory / "results.json").write_text(json.dumps(results))
    results = {name: results[name] for name in VARIANTS if name in results}
    plot(results, args.directory)
    first, *others = results.values()
    same = all(
        (one["rewards"], one["weights"]) == (first["rewards"], first["weights"]) for one in others
    )
    print("rewards and final weights are", "equal" if same else "NOT equal")


if __name__ == "__main__":
    main()
