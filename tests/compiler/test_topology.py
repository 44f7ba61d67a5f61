"""Names of TPU topologies."""

import pytest

from dflash.compiler import topology


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *(("v5p-8", "v5p:2x2x1"), ("v5p-64", "v5p:2x4x4"), ("v5p-4096", "v5p:8x16x16")),
        *(("v4-16", "v4:2x2x2"), ("v5litepod-1", "v5e:1x1"), ("v5litepod-128", "v5e:8x16")),
        *(("v5e-32", "v5e:4x8"), ("v6e-8", "v6e:2x4"), ("v6e-256", "v6e:16x16")),
    ],
)
def test_accelerator_types_are_topologies(name, shape):
    """As Cloud TPU's documentation gives them."""
    assert topology.shape_of_type(name) == shape


@pytest.mark.parametrize("name", ["v5p:2x2x1", "v5p-7", "v5p-12", "v5p-0", "v5p-1", "v9-8", "v5p-"])
def test_other_names_stay(name):
    assert topology.shape_of_type(name) == name
