"""Compiles for TPUs that are not present; tests that do so carry the marker `tpu_compiler`."""

import jax
from jax.experimental import topologies

CHIPS = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")


def compile_for(topology, function, shapes, donate=()):
    """Compiles `function` for one device of a topology and asserts that it calls a kernel.

    Args:
      topology: Name of the topology, such as "v5p:2x2x1".
      function: Function of arrays.
      shapes: Shape and dtype of each argument.
      donate: Numbers of the arguments whose memory results may take.
    """
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    place = jax.sharding.SingleDeviceSharding(device)
    arguments = [jax.ShapeDtypeStruct(*shape, sharding=place) for shape in shapes]
    compiled = jax.jit(function, donate_argnums=donate).lower(*arguments).compile()
    assert "tpu_custom_call" in compiled.as_text()
    return compiled
