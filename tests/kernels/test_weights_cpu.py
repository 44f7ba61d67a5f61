import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash.kernels import library_cpu, matmul_cpu, weights_cpu
from dflash.runs import cpu_kernels

pytestmark = pytest.mark.skipif(cpu_kernels.find_compiler() is None, reason="needs a C++ compiler")


def random_bits(*shape):
    """Numbers of every kind, NaNs with payloads among them."""
    bits = np.random.default_rng(sum(shape)).integers(0, 2**32, shape, np.uint32)
    return bits, jnp.asarray(bits.view(np.float32))


def bits_of(array):
    return np.asarray(array).view(np.uint32)


@pytest.mark.parametrize(
    "shape", [(64, 64), (48, 112), (1152, 384), (37, 131), (16, 257), (259, 16), (1, 5000)]
)
def test_transposed_bits_are_the_same(shape):
    bits, array = random_bits(*shape)
    assert weights_cpu.is_supported(array)
    found = weights_cpu.assemble([array], shape[::-1], transposed=True)
    np.testing.assert_array_equal(bits_of(found), bits.T)


@pytest.mark.parametrize(
    ("shape", "rows"),
    [((64, 3, 64), 64), ((37, 4, 131), 37), ((32, 3, 5, 32), 32), ((6, 3, 16, 64), 96)],
)
@pytest.mark.parametrize("panels", [False, True])
def test_bits_of_a_layer_are_the_same(shape, rows, panels):
    bits, array = random_bits(*shape)
    for layer in range(shape[1]):
        expected = bits[:, layer].reshape(rows, -1)
        if panels and expected.shape[1] % library_cpu.panel_columns():
            pytest.skip("no number of panels")
        expected = matmul_cpu.to_panels(expected) if panels else expected
        found = weights_cpu.assemble([array], expected.shape, layer=layer)
        np.testing.assert_array_equal(bits_of(found), expected)


@pytest.mark.parametrize("widths", [(128, 64, 64), (96, 48, 112), (33, 95)])
@pytest.mark.parametrize("panels", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_bits_of_joined_parts_are_the_same(widths, panels, transposed):
    parts = [random_bits(150, width) for width in widths]
    expected = np.concatenate([bits for bits, _ in parts], axis=1)
    expected = matmul_cpu.to_panels(expected) if panels else expected
    arrays = [array.T if transposed else array for _, array in parts]
    found = weights_cpu.assemble(arrays, expected.shape, transposed=transposed)
    np.testing.assert_array_equal(bits_of(found), expected)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_every_number_is_checked(value):
    is_finite = jax.jit(weights_cpu.is_finite)
    array = np.full((37, 131), 3e38, np.float32)
    assert weights_cpu.is_supported(array)  # Or no kernel is known to XLA yet.
    assert is_finite(array)
    for place in (0, 17, 2000, 4799, 4800, 4846):
        spoiled = array.copy()
        spoiled.flat[place] = value
        assert not is_finite(spoiled)
