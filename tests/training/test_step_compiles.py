"""Weights of a train step in the program that the TPU compiler generates."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import topologies
from support.models import make_sharding

from dflash.layers.linear import Linear
from dflash.parallel import compiler_options, parameters
from dflash.parallel.sharding import Sharding

pytestmark = pytest.mark.tpu_compiler

WIDTH = 512


@pytest.fixture
def sharding():
    """Returns a sharding with fsdp over the four chips of v5e:2x2."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    like = make_sharding(fsdp=4)
    return Sharding(
        jax.sharding.Mesh(np.reshape(devices, (1, 4, 1, 1)), like.mesh.axis_names), like.rules
    )


class Three(nnx.Module):
    """Three linear maps, one after the other."""

    def __init__(self, sharding):
        build = {"dtype": jnp.bfloat16, "sharding": sharding}
        self.maps = nnx.List(Linear(WIDTH, WIDTH, ("embed", "mlp"), **build) for _ in range(3))

    def __call__(self, x):
        for one in self.maps:
            x = one(x)
        return x


def test_weights_are_gathered_while_products_run(sharding):
    graph, params = nnx.split(Three(sharding))

    def call(params, x):
        return parameters.gathered(nnx.merge(graph, params), sharding)(x)

    rows = sharding.abstract((4, WIDTH, WIDTH), ("batch", None, None), jnp.bfloat16)
    options = compiler_options.training_options(sharding)
    text = jax.jit(call).lower(params, rows).compile(compiler_options=options).as_text()
    # Nothing runs yet beside the first gathers.
    assert re.search(r"%async-collective-start\S* = ", text)


def test_options_that_a_compiler_does_not_know_are_left_out(sharding):
    assert compiler_options.training_options(sharding)
    assert compiler_options._known((("xla_no_such_option", "true"),), sharding) == {}
    assert compiler_options.training_options(make_sharding(fsdp=2)) == {}
