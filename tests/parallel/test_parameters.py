import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.models import make_sharding

from dflash.parallel import parameters

EIGHT = {"data": 2, "fsdp": 2, "tensor": 2}
FILLS = {
    "initialize": lambda module: parameters.initialize(module, jax.random.key(3)),
    "init_fast_random": lambda module: parameters.init_fast_random(module, 3),
}


class Pair(nnx.Module):
    """Two matrices, one of them in a list, and a scale."""

    def __init__(self, sharding, dtype=jnp.float32, width=64):
        build = {"sharding": sharding, "dtype": dtype}
        self.table = parameters.declare((128, width), ("vocab", "embed"), stddev=0.5, **build)
        more = parameters.declare((width, 128), ("embed", "mlp"), stddev=2.0, **build)
        self.more = nnx.List([more])
        self.scale = parameters.declare((width,), (None,), stddev=None, **build)


def values(module):
    return {path: param.get_value() for path, param in parameters.named_parameters(module)}


def test_a_module_is_born_abstract():
    module = Pair(make_sharding(**EIGHT), jnp.bfloat16)
    declared = values(module)
    assert list(declared) == ["more.0", "scale", "table"]
    assert all(isinstance(value, jax.ShapeDtypeStruct) for value in declared.values())
    assert declared["table"].shape == (128, 64)
    assert declared["table"].dtype == jnp.bfloat16
    assert declared["table"].sharding.spec == jax.sharding.PartitionSpec("tensor", "fsdp")
    assert parameters.count(module) == 2 * 128 * 64 + 64


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_fills_are_as_declared(fill, dtype):
    module = Pair(make_sharding(), dtype)
    FILLS[fill](module)
    filled = values(module)
    assert {value.dtype for value in filled.values()} == {jnp.dtype(dtype)}
    np.testing.assert_array_equal(filled["scale"], np.ones(64))
    for path, stddev in (("table", 0.5), ("more.0", 2.0)):
        weights = np.asarray(filled[path], np.float64)
        assert weights.mean() == pytest.approx(0, abs=0.05 * stddev)
        assert weights.std() == pytest.approx(stddev, rel=0.05)
        # Neighbours have nothing to do with each other, along either axis, nor do the matrices.
        for left, right in ((weights[1:], weights[:-1]), (weights[:, 1:], weights[:, :-1])):
            assert abs(np.corrcoef(left.ravel(), right.ravel())[0, 1]) < 0.05
    tables = [np.asarray(filled[path], np.float64).ravel() for path in ("table", "more.0")]
    assert abs(np.corrcoef(*tables)[0, 1]) < 0.05


@pytest.mark.parametrize("fill", FILLS)
def test_eight_devices_hold_the_same_as_one(fill):
    one, eight = Pair(make_sharding()), Pair(make_sharding(**EIGHT))
    for module in (one, eight):
        FILLS[fill](module)
    assert values(eight)["table"].addressable_shards[0].data.shape == (64, 32)
    assert values(eight)["table"].sharding.spec == jax.sharding.PartitionSpec("tensor", "fsdp")
    for path, value in values(eight).items():
        assert len(value.sharding.device_set) == 8
        np.testing.assert_array_equal(value, values(one)[path])


def test_seeds_differ():
    modules = [Pair(make_sharding()) for _ in range(3)]
    parameters.initialize(modules[0], jax.random.key(3))
    parameters.initialize(modules[1], jax.random.key(4))
    parameters.initialize(modules[2], jax.random.key(3))
    tables = [np.asarray(values(module)["table"]) for module in modules]
    assert not np.any(tables[0] == tables[1])
    np.testing.assert_array_equal(tables[0], tables[2])
    scrambled = [Pair(make_sharding()) for _ in range(2)]
    for seed, module in enumerate(scrambled):
        parameters.init_fast_random(module, seed)
    assert np.mean(values(scrambled[0])["table"] == values(scrambled[1])["table"]) < 0.01


def test_assign_puts_arrays_where_their_paths_say():
    module = Pair(make_sharding(), width=2)
    arrays = {
        path: jnp.full(value.shape, i, jnp.float32)
        for i, (path, value) in enumerate(values(module).items())
    }
    parameters.assign(module, arrays)
    assert module.more[0][0, 0] == 0
    assert module.scale[0] == 1
    assert module.table[0, 0] == 2


@pytest.mark.parametrize("fill", FILLS)
def test_an_offset_is_added_to_what_is_drawn(fill):
    module = nnx.Dict(
        rows=parameters.declare(
            (2, 500), (None, None), dtype=jnp.float32, sharding=make_sharding(), stddev=0.1,
            offset=((0.0,), (3.0,)),
        )
    )  # fmt: skip
    FILLS[fill](module)
    means = np.asarray(values(module)["rows"]).mean(axis=1)
    np.testing.assert_allclose(means, [0, 3], atol=0.05)


def test_gathered_weights_are_whole_and_their_gradients_split():
    sharding = make_sharding(**EIGHT)
    module = Pair(sharding)
    parameters.initialize(module, jax.random.key(0))
    graph, params = nnx.split(module)
    rows = jax.device_put(jnp.ones((8, 64)), sharding.named((8, 64), ("batch", None)))

    def total(params, gather):
        module = nnx.merge(graph, params)
        module = parameters.gathered(module, sharding) if gather else module
        hidden = jnp.sin(rows * module.scale[...]) @ module.more[0][...]
        return jnp.sum(jnp.cos(hidden) @ module.table[...])

    program = jax.jit(jax.value_and_grad(total), static_argnums=1)
    for ours, plain in zip(
        jax.tree.leaves(program(params, True)), jax.tree.leaves(program(params, False)), strict=True
    ):
        np.testing.assert_allclose(ours, plain, rtol=1e-3, atol=1e-3)
    for grad, param in zip(
        jax.tree.leaves(program(params, True)[1]), jax.tree.leaves(params), strict=True
    ):
        assert grad.ndim == 1 or grad.sharding.is_equivalent_to(param.sharding, 2)
    whole = jax.jit(lambda params: _gathered_arrays(graph, params, sharding))(params)
    shards = {path: x.addressable_shards[0].data.shape for path, x in whole.items()}
    assert shards == {"more.0": (64, 64), "scale": (64,), "table": (64, 64)}


def _gathered_arrays(graph, params, sharding):
    return values(parameters.gathered(nnx.merge(graph, params), sharding))
