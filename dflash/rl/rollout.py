"""Rollout engine for Tunix and MaxText that decodes with a drafter.

The output follows the policy exactly, at any temperature. In float32, the same seed gives the same
tokens with every drafter and without one, so that drafting changes the time of a step and nothing
else.
"""

import dataclasses
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash import errors
from dflash.checkpoints import foreign_trees
from dflash.llm import LLM, Completion
from dflash.parallel import distributed
from dflash.rl import options as options_lib
from dflash.rl.upkeep import Rollout, TokenLogps, Upkeep, has_fallen
from dflash.sampling import Sampling
from dflash.version import install_command

try:
    from tunix.rl.rollout import base_rollout
except ImportError as error:
    raise errors.ConfigError(
        f"dflash.rl: needs google-tunix ({error}); {install_command('rl')}"
    ) from error

_PROBE = "What is 12 + 34? The answer is 46."


@dataclasses.dataclass(frozen=True)
class RolloutStats:
    """Statistics of the rollouts since the last update of the weights.

    Attributes:
      cycles: Number of forward passes of the policy per sequence, summed over sequences.
      seconds: Time of decoding, in seconds.
      training: Metrics of training the drafter on these rollouts; see `Upkeep.train`.
      training_seconds: Time of this training, in seconds.
      step_seconds: Time from the previous update of the weights to this one, in seconds.
    """

    tokens: int = 0
    cycles: int = 0
    committed: int = 0
    seconds: float = 0.0
    training: Mapping[str, float] = dataclasses.field(default_factory=dict)
    training_seconds: float = 0.0
    step_seconds: float = 0.0

    @property
    def tau(self) -> float:
        """Mean acceptance length (τ); nan without cycles."""
        return self.committed / self.cycles if self.cycles else float("nan")

    @property
    def training_share(self) -> float:
        """Fraction of the step's time that training the drafter took."""
        return self.training_seconds / self.step_seconds if self.step_seconds else 0.0

    def plus(self, completions: Sequence[Completion], seconds: float) -> "RolloutStats":
        """Returns the statistics with those of further completions."""
        lengths = [length for completion in completions for length in completion.acceptance_lengths]
        return dataclasses.replace(
            self,
            tokens=self.tokens + sum(len(completion.token_ids) for completion in completions),
            cycles=self.cycles + len(lengths),
            committed=self.committed + sum(lengths),
            seconds=self.seconds + seconds,
        )


class DFlashRollout(base_rollout.BaseRollout):
    """Rollout engine of Tunix's `ClusterConfig.rollout_engine`.

    Attributes:
      stats: Statistics of the rollouts with the present weights.
      history: Statistics of the rollouts with each of the earlier weights that had any.
      upkeep: Training of the drafter; None if `train.every` is 0.
      num_sequences: Number of sequences drawn so far, each with noise of its own. A trainer with a
        seed stores it, and gives it to the engine of a resumed run as the option `num_sequences`.
    """

    def __init__(
        self,
        rollout_actor: nnx.Module,
        tokenizer: Any,
        mesh: jax.sharding.Mesh | None = None,
        rollout_config: base_rollout.RolloutConfig | None = None,
        *,
        dflash: Mapping[str, Any] | None = None,
        **ignored: Any,
    ):
        """Loads the drafter and the policy's config, and copies the policy's weights.

        Args:
          mesh: Mesh of the rollout role; unused, since `dflash` may state a mesh of its own.
          rollout_config: Sizes and sampling; may hold options, see `options.find`.
          dflash: Keys of our configs, such as {"target": {"checkpoint": …}, "drafter": {…}}, and
            "config", the path of a config file, "lora_alpha" and "num_sequences".
          **ignored: Arguments for other engines, such as MaxText's `maxtext_config`.
        Raises:
          UserError: The options are unusable, or the tokenizer or weights do not fit the target.
        """
        rollout_config = rollout_config or base_rollout.RolloutConfig()
        options = options_lib.find(rollout_config, dflash)
        upkeep = options_lib.upkeep(options, rollout_config.temperature)
        self._lora_alpha = options.get(options_lib.LORA_ALPHA)
        self.llm = LLM(
            options.get(options_lib.CONFIG),
            *options_lib.defaults(options, rollout_config),
            *options_lib.overrides(options),
            target=options.get(options_lib.CHECKPOINT),
        )
        self._actor, self._tokenizer = rollout_actor, tokenizer
        self._check_tokenizer()
        self.stats, self.history = RolloutStats(), []
        self.num_sequences = options_lib.num_sequences(options)
        # Without a seed, the engine of a resumed run draws with other noise.
        self._own_seed = distributed.compute_on_first(lambda: secrets.randbits(63))
        self.upkeep = Upkeep(self.llm, upkeep) if upkeep.train.every else None
        layers = self.upkeep.feature_layers if self.upkeep else ()
        self._logps = TokenLogps(self.llm.target, layers)
        self._training, self._rollouts = upkeep.train, []  # Rollouts to train on.
        self._step_began = time.perf_counter()
        self.update_params(nnx.state(rollout_actor, nnx.Param))

    # --- the interface of Tunix -----------------------------------------------------------------

    def generate(
        self, prompts: list[str], rollout_config: base_rollout.RolloutConfig, **kwargs: Any
    ) -> base_rollout.RolloutOutput:
        """Decodes prompts; equal prompts share the full pages of one prefill.

        Output tokens include the stop token. Log-probabilities are those of the distribution that
        tokens were drawn from, or of the raw logits if `rollout_vllm_logprobs_mode` is
        "raw_logprobs".

        Raises:
          InputError: A prompt is empty or too long.
        """
        ids = [self._encode(prompt) for prompt in prompts]
        sampling = self._sampling(rollout_config)
        begin = time.perf_counter()
        completions = self.llm.generate(ids, sampling)
        self.stats = self.stats.plus(completions, time.perf_counter() - begin)
        self.num_sequences += len(prompts)
        if self.upkeep is not None:
            self._rollouts += [
                Rollout(completion.prompt_token_ids, completion.token_ids)
                for completion in completions
            ]
        logprobs = None
        if rollout_config.return_logprobs:
            raw = rollout_config.rollout_vllm_logprobs_mode == "raw_logprobs"
            logprobs = [
                np.array(
                    [t.logprob if raw else t.sampled_logprob for t in completion.logprobs],
                    np.float32,
                )
                for completion in completions
            ]
        return base_rollout.RolloutOutput(
            text=[self._decode(completion) for completion in completions],
            logits=None,
            tokens=[np.array(completion.token_ids, np.int32) for completion in completions],
            left_padded_prompt_tokens=self._left_padded(ids, rollout_config.max_prompt_length),
            logprobs=logprobs,
        )

    def get_per_token_logps(
        self,
        prompt_tokens: jax.Array,
        completion_tokens: jax.Array,
        temperature: float = 1.0,
        **kwargs: Any,
    ) -> jax.Array:
        """Returns log-probabilities, float32 [B, T], of tokens after left-padded prompts [B, P]."""
        scores = self._logps(prompt_tokens, completion_tokens, self.pad_id(), temperature)
        if self.upkeep is not None:
            with jax.transfer_guard("allow"):
                self.upkeep.keep(prompt_tokens, completion_tokens, self.pad_id(), scores.outputs)
        return scores.logps

    def update_params(
        self, params: Any, filter_types: tuple[Any, ...] | type | None = None
    ) -> None:
        """Trains the drafter if it is time, and replaces the policy's weights.

        Parameters that are left out are those of the actor.

        Raises:
          CheckpointError: The weights do not fit, or hold NaN; the old ones stay.
        """
        tree = params
        if filter_types is not None and _only_lora(filter_types):
            tree = foreign_trees.flatten(self._actor) | foreign_trees.flatten(params)
        with jax.transfer_guard("allow"):  # Tunix forbids transfers meanwhile.
            self._train_drafter()
            self.llm.update_weights(tree, lora_alpha=self._lora_alpha)
        if self.stats.tokens:
            end = time.perf_counter()
            step_s = end - self._step_began
            self.history.append(dataclasses.replace(self.stats, step_seconds=step_s))
            self.stats, self._step_began = RolloutStats(), end

    def _train_drafter(self) -> None:
        taus = [step.tau for step in (*self.history, self.stats) if step.cycles]
        if not self._rollouts or (len(self.history) + 1) % self._training.every:
            return
        if not has_fallen(taus, self._training.below):
            self._rollouts = self._rollouts[-self.upkeep.num_rows :]
            return
        begin = time.perf_counter()
        metrics = self.upkeep.train(self._rollouts)
        jax.block_until_ready(nnx.state(self.llm.drafter))
        seconds, self._rollouts = time.perf_counter() - begin, []
        self.stats = dataclasses.replace(self.stats, training=metrics, training_seconds=seconds)

    def pad_id(self) -> int:
        """Returns the token that pads prompts and outputs."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """Returns the tokenizer's stop token."""
        return self._tokenizer.eos_id()

    def model(self) -> None:
        """Returns None: the weights are copies under names of our own.

        Tunix compares this model's arrays with the actor's to find out whether they are shared.
        """

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """Mesh of the devices that decode."""
        return self.llm.target.sharding.mesh

    # --- metrics --------------------------------------------------------------------------------

    def metrics(self, *args: Any, **kwargs: Any) -> dict[str, tuple[float, Any]]:
        """Returns metrics of the step, for `metric_fns` of Tunix's learners.

        The drafter is trained at a step's end, so its time is that of the step before.
        """
        previous = self.history[-1] if self.history else RolloutStats()
        return {
            "rollout/tau": (self.stats.tau, np.mean),
            "rollout/tokens": (self.stats.tokens, np.max),
            "rollout/seconds": (self.stats.seconds, np.max),
            "rollout/training_seconds": (previous.training_seconds, np.max),
            "rollout/training_share": (previous.training_share, np.max),
        }

    # --- tokens ---------------------------------------------------------------------------------

    def _encode(self, text: str) -> list[int]:
        """Returns the token ids of a prompt, with one token of begin, as Tunix's sampler has it."""
        begin = self._tokenizer.bos_id()
        ids = list(self._tokenizer.encode(text))
        return list(self._tokenizer.dedup_bos_ids(([begin] if begin else []) + ids))

    def _decode(self, completion: Completion) -> str:
        stopped = completion.finish_reason == "stop"
        ids = completion.token_ids[:-1] if stopped else completion.token_ids
        return self._tokenizer.decode(list(ids))

    def _sampling(self, rollout_config: base_rollout.RolloutConfig) -> Sampling:
        top_k, top_p = rollout_config.top_k, rollout_config.top_p
        return Sampling(
            temperature=float(rollout_config.temperature),
            top_k=0 if top_k is None or top_k < 0 else int(top_k),
            top_p=1.0 if top_p is None else float(top_p),
            max_tokens=int(rollout_config.max_tokens_to_generate),
            seed=self._own_seed if rollout_config.seed is None else _seed(rollout_config.seed),
            first_sequence=self.num_sequences,
            stop_token_ids=list(rollout_config.eos_tokens or [self.eos_id()]),
            ignore_eos=True,
            logprobs=0 if rollout_config.return_logprobs else None,
        )

    def _left_padded(self, ids: Sequence[Sequence[int]], width: int) -> np.ndarray:
        """Returns prompts [B, P]; P is a power of two if a prompt is longer than `width`."""
        longest = max(map(len, ids), default=1)
        width = width if longest <= width else 1 << (longest - 1).bit_length()
        padded = np.full((len(ids), width), self.pad_id(), np.int32)
        for row, prompt in zip(padded, ids, strict=True):
            row[width - len(prompt) :] = prompt
        return padded

    def _check_tokenizer(self) -> None:
        ids = self._tokenizer.encode(_PROBE)
        vocab_size = self.llm.target.arch.vocab_size
        fits = all(0 <= token < vocab_size for token in ids)
        if not fits or _PROBE not in self.llm.tokenizer.decode(list(ids)):
            raise errors.ConfigError(
                "DFlashRollout: the trainer's tokenizer is not that of target.checkpoint "
                f"({self.llm.config.target.checkpoint}): they read other texts from the same ids"
            )


def _only_lora(filter_types: tuple[Any, ...] | type) -> bool:
    types = filter_types if isinstance(filter_types, tuple) else (filter_types,)
    return all(kind is nnx.LoRAParam for kind in types)


def _seed(seed: Any) -> int:
    """Returns a seed of ours for an integer or a jax key."""
    if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    words = [int(word) for word in np.atleast_1d(np.asarray(seed)).reshape(-1)[-2:]]
    return words[0] if len(words) == 1 else (words[0] << 32 | words[1]) & (2**63 - 1)
