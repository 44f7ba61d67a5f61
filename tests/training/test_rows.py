"""Rows of a batch belong to devices, wherever a mesh puts those of a process."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from support import failure, pods

from dflash import errors
from dflash.config.schema import SHARDING_RULES
from dflash.parallel import sharding
from dflash.training import step as steps_lib

V5E = pods.chips("TPU v5 lite", (4, 4, 1), (2, 2, 1))
V6E = pods.chips("TPU v6 lite", (8, 8, 1), (2, 2, 1))
V5P = pods.chips("TPU v5", (4, 4, 4), (2, 2, 1))
TWO_SLICES = pods.chips("TPU v5", (2, 2, 2), (2, 2, 1), slices=2)
MESHES = {
    "v5e 4x4, fsdp 16": (V5E, {"fsdp": 16}, 32),
    "v5e 4x4, data 4 x fsdp 4": (V5E, {"data": 4, "fsdp": 4}, 16),
    "v6e 8x8, fsdp 64": (V6E, {"fsdp": 64}, 64),
    "v5p 4x4x4, fsdp 64": (V5P, {"fsdp": 64}, 128),
    "v6e 8x8, fsdp 16 x tensor 4": (V6E, {"fsdp": 16, "tensor": 4}, 32),
    "v5p 4x4x4, fsdp 16 x tensor 4": (V5P, {"fsdp": 16, "tensor": 4}, 16),
    "v5p 4x4x4, fsdp 8 x tensor 8": (V5P, {"fsdp": 8, "tensor": 8}, 16),
    "two slices, data 2 x fsdp 8": (TWO_SLICES, {"data": 2, "fsdp": 8}, 16),
}


def place(devices, sizes) -> sharding.Sharding:
    """Builds a mesh over abstract devices."""
    described = sharding.make_sharding(sizes, SHARDING_RULES, abstract=True)
    shape = [sizes.get(axis, 1) for axis in sharding.MESH_AXES]
    types = (AxisType.Auto,) * len(shape)
    mesh = Mesh(sharding.arrange(devices, shape), sharding.MESH_AXES, axis_types=types)
    return sharding.Sharding(mesh, described.rules)


@pytest.mark.parametrize("name", MESHES)
def test_every_device_finds_its_rows_with_its_process(name):
    devices, sizes, rows = MESHES[name]
    placed = place(devices, sizes)
    found = steps_lib.rows_by_process(placed, rows)
    assert list(found) == sorted({one.process_index for one in devices})
    wanted = {process: set() for process in found}
    # From the mesh itself: data and fsdp, in this order, split the rows.
    pieces = sizes.get("data", 1) * sizes.get("fsdp", 1)
    for at, device in np.ndenumerate(placed.mesh.devices):
        piece = at[0] * sizes.get("fsdp", 1) + at[1]
        begin = piece * rows // pieces
        wanted[device.process_index] |= set(range(begin, begin + rows // pieces))
    assert found == {process: tuple(sorted(some)) for process, some in wanted.items()}
    assert set().union(*found.values()) == set(range(rows))


def test_the_rows_of_a_host_are_not_those_of_its_number():
    """The device ring of a v5e leaves a host and returns to it, so its rows are not contiguous."""
    found = steps_lib.rows_by_process(place(V5E, {"fsdp": 16}), 16)
    assert found[1] == (2, 3, 4, 5)
    assert found[0] == (0, 1, 6, 15)


def test_slices_split_the_data_axis():
    placed = place(TWO_SLICES, {"data": 4, "tensor": 4})
    slices = [[one.slice_index for one in replica.flat] for replica in placed.mesh.devices]
    assert slices == [[0] * 4, [0] * 4, [1] * 4, [1] * 4]
    assert failure(place, TWO_SLICES, {"fsdp": 16}, kind=errors.ConfigError) == (
        "mesh.data: 1 does not divide over 2 slices, which split the data axis, the only one with "
        "little enough traffic for the data center network"
    )


def test_a_run_starts_on_several_slices(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: TWO_SLICES)
    monkeypatch.setattr(jax, "device_count", lambda: len(TWO_SLICES))
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    mesh = sharding.make_sharding({"data": 2, "fsdp": 8}, SHARDING_RULES).mesh
    assert [one.slice_index for one in mesh.devices[1].flat] == [1] * 8


def test_a_batch_is_placed_row_by_row():
    """Eight devices in another order than their numbers."""
    order = [0, 5, 1, 4, 7, 2, 3, 6]
    sizes = {"fsdp": 4, "tensor": 2}
    described = sharding.make_sharding(sizes, SHARDING_RULES, abstract=True)
    devices = np.array(jax.devices())[order].reshape(1, 4, 2, 1)
    mesh = Mesh(devices, sharding.MESH_AXES, axis_types=(AxisType.Auto,) * 4)
    placed = sharding.Sharding(mesh, described.rules)
    batch = np.arange(24, dtype=np.int32).reshape(8, 3)
    found = steps_lib.place({"x": batch}, placed, 8)["x"]
    np.testing.assert_array_equal(found, batch)
    assert found.addressable_shards[0].data.shape == (2, 3)
