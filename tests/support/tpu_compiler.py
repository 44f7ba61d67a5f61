"""Compiles for TPUs that are not present; see `needs_compiler`."""

import importlib.util
import os

import jax
import pytest
from jax.experimental import topologies

CHIPS = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")

# 0.7 GB, and Linux on x86-64 only: the tests' requirements leave it out.
needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="compiles for TPUs, which needs no TPU but their compiler: pip install 'jax[tpu]'",
)


def compile_for(topology, function, shapes, donate=()):
    """Compiles `function` for one device of a topology, and makes sure that it runs a kernel.

    Args:
      topology: such as "v5p:2x2x1".
      function: takes arrays.
      shapes: of each argument, shape and dtype.
      donate: numbers of the arguments whose memory results may take.
    """
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    # No chip is acquired: other processes may be compiling too.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "true")
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    place = jax.sharding.SingleDeviceSharding(device)
    arguments = [jax.ShapeDtypeStruct(*shape, sharding=place) for shape in shapes]
    compiled = jax.jit(function, donate_argnums=donate).lower(*arguments).compile()
    assert "tpu_custom_call" in compiled.as_text()
    return compiled
