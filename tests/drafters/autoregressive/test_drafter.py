"""A language model as drafter: what it accepts of itself, its pages, its checkpoints."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.engines import decode, engine, expected, random_prompts
from support.golden import GOLDEN, load
from support.models import ARCHITECTURE, make_sharding, target

from dflash import errors
from dflash.drafters.autoregressive import Autoregressive
from dflash.drafters.autoregressive_config import AutoregressiveConfig, DraftModelArchitecture
from dflash.loading import models
from dflash.models.dense import Llama3, Qwen3
from dflash.parallel import parameters

CASE = "qwen3_v12"


def build(config: AutoregressiveConfig, arch=ARCHITECTURE) -> Autoregressive:
    source = models.find_drafter(config)
    return models.build_drafter(config, source, arch, dtype="float32", sharding=make_sharding())


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_drafter_that_is_the_target_is_never_refused(temperature):
    """Checks prompts of several chunks and outputs of several pages."""
    model = Autoregressive(target(), block_size=4, page_size=16)
    run = engine(model, batch_size=3, sync_every=4, max_length=80)
    prompts, limits = random_prompts([1, 33, 16, 50, 7]), [30, 25, 1, 29, 32]
    done = decode(run, prompts, limits, temperature=temperature)
    wanted = expected(prompts, limits, temperature=temperature)
    assert [(one.output_ids, one.finish_reason) for one in done] == wanted
    for one in done:
        whole, rest = divmod(len(one.output_ids) - 1, 4)
        assert one.acceptance_lengths == (4,) * whole + (rest,) * bool(rest)


def test_probabilities_are_those_of_the_model():
    """The same weights again: draft and target agree, so rejection accepts everything too."""
    model = Autoregressive(target(), block_size=4)
    run = engine(model, batch_size=2, max_length=64, verify="rejection", temperature=0.8)
    done = decode(run, random_prompts([3, 17]), 25)
    assert [one.acceptance_lengths for one in done] == [(4,) * 6] * 2


def test_a_checkpoint_of_a_target_becomes_a_drafter():
    config = AutoregressiveConfig(checkpoint=str(GOLDEN / CASE / "target"))
    source = models.find_drafter(config)
    arch = Qwen3.architecture_from_hf(source.hf)
    built = models.build_drafter(config, source, arch, dtype="float32", sharding=make_sharding())
    models.load_weights(built, source)
    assert isinstance(built.model, Qwen3)
    wanted = dict(parameters.named_parameters(load(Qwen3, GOLDEN / CASE / "target")))
    found = dict(parameters.named_parameters(built.model))
    assert found.keys() == wanted.keys()
    for path, param in found.items():
        np.testing.assert_array_equal(param.get_value(), wanted[path].get_value(), err_msg=path)


def test_random_weights_are_of_the_family_that_is_named():
    config = AutoregressiveConfig(
        checkpoint="random",
        family="llama3",
        architecture=DraftModelArchitecture(num_hidden_layers=1, hidden_size=16),
    )
    model = build(config).model
    assert isinstance(model, Llama3)
    assert (model.arch.num_hidden_layers, model.arch.hidden_size) == (1, 16)
    assert model.arch.vocab_size == ARCHITECTURE.vocab_size


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"checkpoint": str(GOLDEN / CASE / "target")}, errors.CheckpointError,
         "drafter.checkpoint: the vocabulary of 12 tokens differs from the target's of 24"),
        ({"checkpoint": str(GOLDEN / CASE / "draft")}, errors.CheckpointError,
         "DFlashDraftModel is not supported, only Qwen3ForCausalLM"),
        ({"checkpoint": "random", "family": "qwen33"}, errors.ConfigError,
         "drafter.family: unknown name 'qwen33'; did you mean 'qwen3'?"),
        ({"checkpoint": "random",
          "architecture": DraftModelArchitecture(num_attention_heads=9)},
         errors.ConfigError, "num_attention_heads: 9 does not divide into num_key_value_heads=8"),
    ],
    ids=["vocabulary", "architecture", "family", "heads"],
)  # fmt: skip
def test_what_does_not_fit_is_one_line(options, kind, message):
    with pytest.raises(kind, match=message) as caught:
        build(AutoregressiveConfig(**options))
    assert "\n" not in str(caught.value)


def test_training_it_is_refused():
    model = build(AutoregressiveConfig(checkpoint="random"))
    with pytest.raises(errors.ConfigError, match="task=target"):
        model.loss(None, None, jax.random.key(0), None)


def test_a_mesh_splits_the_pages_as_it_splits_the_batch():
    sharding = make_sharding(data=2, tensor=2)
    model = Autoregressive(
        Qwen3(ARCHITECTURE, dtype=jnp.float32, sharding=sharding), block_size=4, page_size=16
    )
    pool = model.init_state(6, 40).cache.pools[0]
    assert pool.shape == (4, 6 * 3, 16, 8)
    assert pool.sharding.shard_shape(pool.shape) == (2, 3 * 3, 16, 8)


def test_random_weights_of_a_family_whose_shape_is_not_stated():
    with pytest.raises(errors.ConfigError) as caught:
        build(AutoregressiveConfig(checkpoint="random", family="qwen3_moe"))
    message = str(caught.value)
    assert message.startswith(
        "drafter.family: 'qwen3_moe' has experts or attention of its own, which "
        "drafter.architecture does not state; use drafter.checkpoint, or a family of qwen3, llama3"
    )
    assert "qwen3_moe" not in message.partition("a family of")[2]
