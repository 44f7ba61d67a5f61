"""Names of TPU topologies."""

import pytest

from dflash.compiler import topology

# Cloud TPU's accelerator types, and the topologies that its documentation gives for them.
TYPES = {
    **{"v5p-8": "v5p:2x2x1", "v5p-16": "v5p:2x2x2", "v5p-32": "v5p:2x2x4", "v5p-64": "v5p:2x4x4"},
    **{"v5p-128": "v5p:4x4x4", "v5p-256": "v5p:4x4x8", "v5p-512": "v5p:4x8x8"},
    **{"v5p-1024": "v5p:8x8x8", "v5p-2048": "v5p:8x8x16", "v5p-4096": "v5p:8x16x16"},
    **{"v4-8": "v4:2x2x1", "v4-16": "v4:2x2x2", "v4-32": "v4:2x2x4"},
    **{"v5litepod-1": "v5e:1x1", "v5litepod-4": "v5e:2x2", "v5litepod-8": "v5e:2x4"},
    **{"v5litepod-16": "v5e:4x4", "v5e-32": "v5e:4x8", "v5litepod-64": "v5e:8x8"},
    **{"v5litepod-128": "v5e:8x16", "v5litepod-256": "v5e:16x16"},
    **{"v6e-1": "v6e:1x1", "v6e-4": "v6e:2x2", "v6e-8": "v6e:2x4", "v6e-256": "v6e:16x16"},
}


@pytest.mark.parametrize("name", TYPES)
def test_accelerator_types_are_topologies(name):
    assert topology.shape_of_type(name) == TYPES[name]


@pytest.mark.parametrize("name", ["v5p:2x2x1", "v5p-7", "v5p-12", "v5p-0", "v5p-1", "v9-8", "v5p-"])
def test_other_names_stay(name):
    assert topology.shape_of_type(name) == name
