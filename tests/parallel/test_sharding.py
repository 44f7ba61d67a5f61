"""Tests of logical axes on meshes, described ones and one of eight CPU devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support
from support.models import make_sharding

from dflash import errors
from dflash.config.schema import SHARDING_RULES
from dflash.parallel import sharding

P = jax.sharding.PartitionSpec
failure = functools.partial(support.failure, kind=errors.ConfigError)
RULES = SHARDING_RULES | {"everything": ("data", "fsdp", "tensor")}


def describe(data=1, fsdp=1, tensor=1, rules=RULES):
    """A mesh of any size; needs no devices."""
    sizes = {"data": data, "fsdp": fsdp, "tensor": tensor}
    return sharding.make_sharding(sizes, rules, abstract=True)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ((), P()),
        (("vocab", "embed"), P("tensor", "fsdp")),
        (("batch", None, "heads", None), P(("data", "fsdp"), None, "tensor", None)),
        (("features", None), P(None, None)),
        (("everything",), P(("data", "fsdp", "tensor"))),
    ],
)
def test_spec(names, expected):
    assert describe(2, 4, 8).spec(*names) == expected


def test_axes_of_one_device_do_not_count():
    sizes = describe(data=2, tensor=4)
    assert sizes.spec("batch", "embed", "vocab") == P("data", None, "tensor")
    assert [sizes.size(name) for name in ("batch", "embed", "everything", None)] == [2, 1, 8, 1]
    # On a whole mesh these would collide; here they want nothing.
    assert describe().spec("batch", "pages", "embed") == P(None, None, None)


def test_collision():
    assert failure(describe(2, 4).spec, "batch", "embed") == (
        "sharding_rules: 'batch' and 'embed' are dimensions of one array and both want mesh axis "
        "'fsdp'; give them different axes"
    )


def test_sequences_live_with_their_pages():
    assert failure(describe, rules=RULES | {"pages": ("fsdp",)}) == (
        "sharding_rules: batch ['data', 'fsdp'] and pages ['fsdp'] differ; give both the same axes"
    )


def test_unknown_axis():
    assert failure(describe().spec, "vocabulary") == (
        "sharding_rules: no rule for axis 'vocabulary'; did you mean 'vocab'?"
    )
    assert failure(describe(rules={"batch": ()}).spec, "heads") == (
        "sharding_rules: no rule for axis 'heads'; expected one of batch"
    )


def test_indivisible():
    mesh = describe(data=2, fsdp=4)
    assert mesh.named((16, 3), ("batch", None)).spec == P(("data", "fsdp"), None)
    assert failure(mesh.named, (12, 3), ("batch", None)) == (
        "mesh: axis 'batch' of length 12 does not divide over 8 devices (data × fsdp)"
    )


@pytest.mark.parametrize(
    ("sizes", "length", "advice"),
    [
        ({"tensor": 16}, 8, "mesh.tensor=8 mesh.data=2"),
        ({"tensor": 16, "data": 2}, 4, "mesh.tensor=4 mesh.data=8"),
        ({"tensor": 6}, 8, "mesh.tensor=2 mesh.data=3"),
        ({"tensor": 4}, 1, "mesh.tensor=1 mesh.data=4"),
    ],
)
def test_too_many_shards_of_a_model_name_a_mesh_that_fits(sizes, length, advice):
    with pytest.raises(errors.ConfigError) as caught:
        sharding.make_sharding(sizes, RULES, abstract=True).named((length,), ("kv_heads",))
    assert str(caught.value).endswith(f"(tensor); as many devices: {advice}")
    fitting = {
        key.removeprefix("mesh."): int(n) for key, n in (w.split("=") for w in advice.split())
    }
    sharding.make_sharding(fitting, RULES, abstract=True).named((length,), ("kv_heads",))


def test_unknown_mesh_axis():
    assert failure(describe, rules={"batch": ("dat",)}) == (
        "sharding_rules.batch: unknown mesh axis 'dat'; did you mean 'data'?"
    )


def test_more_devices_than_there_are():
    assert failure(make_sharding, data=3, tensor=4) == (
        "mesh: data × fsdp × tensor × expert = 3 × 1 × 4 × 1 = 12 devices, but 8 are present"
    )


def test_a_mesh_may_leave_devices_idle():
    mesh = make_sharding(data=3, tensor=2).mesh
    assert mesh.devices.tolist() == np.reshape(jax.devices()[:6], (3, 1, 2, 1)).tolist()
    assert hash(make_sharding(data=3)) == hash(make_sharding(data=3))


def test_several_processes_leave_no_device_out(monkeypatch):
    """A process whose devices are all left out would wait for the others for good."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert make_sharding(data=8).mesh.size == 8
    assert failure(make_sharding, data=4) == (
        "mesh: data × fsdp × tensor × expert = 4 × 1 × 1 × 1 = 4 devices, but 8 are present, all "
        "of which several processes must use"
    )


def test_constrain():
    array = jnp.arange(12.0).reshape(4, 3)
    eight = make_sharding(data=2, fsdp=2, tensor=2)
    placed = jax.jit(lambda x: eight.constrain(x, "batch", None))(array)
    assert placed.sharding.is_equivalent_to(eight.named((4, 3), ("batch", None)), 2)
    np.testing.assert_array_equal(placed, array)
    assert make_sharding().constrain(array, "batch", None) is array


def test_map_sees_one_device_s_shards():
    eight = make_sharding(data=2, fsdp=2, tensor=2)
    shapes = []

    def shift(x, pair):
        shapes.append((x.shape, pair["a"].shape))
        piece = 10 * eight.index("batch") + eight.index("features")
        return x + piece, pair["a"] - pair["b"]

    x, pair = jnp.zeros((8, 2)), {"a": jnp.arange(6.0), "b": jnp.ones(6)}
    mapped = eight.map(shift, (("batch", "heads"), ("mlp",)), (("batch", "heads"), ("mlp",)))
    moved, difference = jax.jit(mapped)(x, pair)
    assert set(shapes) == {((2, 1), (3,))}
    np.testing.assert_array_equal(moved[:, 0], [0, 0, 10, 10, 20, 20, 30, 30])
    np.testing.assert_array_equal(difference, np.arange(6) - 1)
