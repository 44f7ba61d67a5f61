"""A language model as drafter: what it accepts of itself, its pages, its checkpoints."""

import functools

import jax
import jax.numpy as jnp
import pytest
from support import failure
from support.engines import check_plain, decode, engine, random_prompts
from support.golden import GOLDEN, build_drafter, load
from support.models import ARCHITECTURE, check_same_weights, make_sharding, target

from dflash import errors
from dflash.drafters.autoregressive import Autoregressive
from dflash.drafters.autoregressive_config import AutoregressiveConfig, DraftModelArchitecture
from dflash.models.dense import Llama3, Qwen3

CASE = "qwen3_v12"


build = functools.partial(build_drafter, arch=ARCHITECTURE, loads=False)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_drafter_that_is_the_target_is_never_refused(temperature):
    """Checks prompts of several chunks and outputs of several pages."""
    model = Autoregressive(target(), block_size=4, page_size=16)
    run = engine(model, batch_size=3, sync_every=4, max_length=80)
    prompts, limits = random_prompts([1, 33, 16, 50, 7]), [30, 25, 1, 29, 32]
    for one in check_plain(run, prompts, limits, temperature=temperature):
        whole, rest = divmod(len(one.output_ids) - 1, 4)
        assert one.acceptance_lengths == (4,) * whole + (rest,) * bool(rest)


def test_probabilities_are_those_of_the_model():
    """The same weights again: draft and target agree, so rejection accepts everything too."""
    model = Autoregressive(target(), block_size=4)
    run = engine(model, batch_size=2, max_length=64, verify="rejection", temperature=0.8)
    done = decode(run, random_prompts([3, 17]), 25)
    assert [one.acceptance_lengths for one in done] == [(4,) * 6] * 2


def test_a_checkpoint_of_a_target_becomes_a_drafter():
    target = load(Qwen3, GOLDEN / CASE / "target")
    config = AutoregressiveConfig(checkpoint=str(GOLDEN / CASE / "target"))
    built = build_drafter(config, target.arch)
    assert isinstance(built.model, Qwen3)
    check_same_weights(built.model, target)


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
    assert message in failure(build, AutoregressiveConfig(**options), kind=kind)


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
    config = AutoregressiveConfig(checkpoint="random", family="qwen3_moe")
    message = failure(build, config, kind=errors.ConfigError)
    assert message.startswith(
        "drafter.family: 'qwen3_moe' has experts or attention of its own, which "
        "drafter.architecture does not state; use drafter.checkpoint, or a family of qwen3, llama3"
    )
    assert "qwen3_moe" not in message.partition("a family of")[2]
