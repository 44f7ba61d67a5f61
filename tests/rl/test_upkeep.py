import jax
import numpy as np
import pytest
from flax import nnx

import dflash
from dflash import errors
from dflash.config.train_schema import LossConfig, UpkeepConfig, UpkeepRun
from dflash.rl import options
from dflash.rl.upkeep import Rollout, Upkeep, has_fallen

TARGET = (
    "target.name=qwen3",
    "target.architecture={vocab_size: 64, hidden_size: 32, intermediate_size: 48, "
    "num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 16, "
    "max_position_embeddings: 256}",
    "dtype=float32",
    "decode.max_length=48",
    "decode.max_new_tokens=40",
    "decode.batch_size=4",
)
DRAFTER = (
    "drafter.name=dflash",
    "drafter.checkpoint=random",
    "drafter.architecture={num_hidden_layers: 1, intermediate_size: 48, num_attention_heads: 4, "
    "num_key_value_heads: 2, head_dim: 16, target_layer_ids: [0, 1], block_size: 4}",
)


def models(*drafter: str) -> dflash.LLM:
    return dflash.LLM(*TARGET, *(drafter or DRAFTER), target="random")


def config(**train) -> UpkeepRun:
    found = options.upkeep({"optimizer.learning_rate": 0.01})
    values = {"every": 1, "steps": 20, "batch_size": 4} | train
    return UpkeepRun(UpkeepConfig(**values), found.optimizer, LossConfig(num_anchors=16))


def decode(llm: dflash.LLM) -> list:
    prompts = [[i + 1, 2 * i + 5, 7] for i in range(4)]
    return llm.generate(prompts, dflash.Sampling(max_tokens=40))


def rollouts(completions) -> list[Rollout]:
    return [Rollout(one.prompt_token_ids, one.token_ids) for one in completions]


def arrays(tree) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def test_training_raises_tau_and_changes_no_token(tmp_path):
    llm = models()
    before = decode(llm)
    upkeep = Upkeep(llm, config(directory=str(tmp_path)))
    first = upkeep.train(rollouts(before))
    last = upkeep.train(rollouts(before))
    after = decode(llm)
    assert last["loss"] < first["loss"]
    assert [one.token_ids for one in after] == [one.token_ids for one in before]
    assert np.mean([one.tau for one in after]) > 1.2 * np.mean([one.tau for one in before])
    upkeep.close()
    # Another process continues with the same weights and optimizer state.
    other = models()
    resumed = Upkeep(other, config(directory=str(tmp_path)))
    assert resumed.num_trainings == 2
    for one, two in zip(arrays(upkeep.state), arrays(resumed.state), strict=True):
        np.testing.assert_array_equal(one, two)
    for one, two in zip(*map(arrays, map(nnx.state, (llm.drafter, other.drafter))), strict=True):
        np.testing.assert_array_equal(one, two)
    resumed.close()


def test_training_begins_when_tau_has_fallen():
    """Means of four steps count, so a prompt whose text is hard to draft does not."""
    taus = [9.0, 11.0, 10.0, 4.0, 11.0, 10.0]
    assert not any(has_fallen(taus[:count], 0.8) for count in range(len(taus) + 1))
    assert has_fallen([*taus, 6.0, 4.0, 5.0], 0.8)
    assert has_fallen([], 2.0)


def test_without_outputs_nothing_happens():
    upkeep = Upkeep(models(), config())
    assert upkeep.train([Rollout((1, 2), (3,))]) == {}
    assert int(upkeep.state.step) == 0


def test_a_drafter_without_weights_cannot_be_trained():
    with pytest.raises(errors.ConfigError, match=r"train.every: 1, but drafter.name=ngram has no"):
        Upkeep(models("drafter.name=ngram"), config())


@pytest.mark.parametrize("key", ["train.evry", "optimizer.rate"])
def test_unknown_options_are_refused(key):
    with pytest.raises(errors.ConfigError, match=f"{key}: unknown key"):
        options.upkeep({key: 1})
