import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash.kernels import library_cpu, matmul_cpu
from dflash.layers.products import project
from dflash.parallel.sharding import Sharding
from dflash.runs import cpu_kernels

pytestmark = pytest.mark.skipif(cpu_kernels.find_compiler() is None, reason="needs a C++ compiler")


def sharding_of(devices: int) -> Sharding:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("tensor",))
    return Sharding(mesh, ())


def make_case(rows, depth, columns, dtype, transposed):
    rng = np.random.default_rng(rows * depth)
    shape = (columns, depth) if transposed else (depth, columns)
    weights = rng.normal(size=shape)
    if dtype == jnp.int8:
        weights = np.clip(40 * weights, -127, 127)
    return rng.normal(size=(rows, depth)), jnp.asarray(weights, dtype)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
@pytest.mark.parametrize(
    ("rows", "depth", "columns"),
    [
        (1, 128, 1024),
        (6, 257, 513),  # neither a number of vectors
        (7, 100, 1331),
        (13, 1024, 130),  # fewer columns than threads take
        (32, 300, 403),
    ],
)
def test_products_and_each_row_alone(rows, depth, columns, dtype, transposed):
    x, weights = make_case(rows, depth, columns, dtype, transposed)
    x = jnp.asarray(x, jnp.float32)
    assert matmul_cpu.is_supported(x, weights, sharding_of(1))
    multiply = jax.jit(matmul_cpu.matmul, static_argnames="transposed")
    found = np.asarray(multiply(x, weights, transposed=transposed))
    exact = np.asarray(weights, np.float64)
    exact = np.asarray(x, np.float64) @ (exact.T if transposed else exact)
    np.testing.assert_allclose(found, exact, rtol=0, atol=2e-6 * np.abs(exact).max())
    for row in range(rows):
        alone = multiply(x[row : row + 1], weights, transposed=transposed)
        np.testing.assert_array_equal(alone[0], found[row])


@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_are_those_of_the_reference(transposed):
    x, weights = make_case(5, 256, 512, jnp.float32, transposed)
    x = jnp.asarray(x, jnp.float32).reshape(1, 5, 256)
    assert matmul_cpu.is_supported(x, weights, sharding_of(1))

    def loss(x, weights):
        return jnp.sin(project(x, weights, sharding_of(1), transposed=transposed)).sum()

    def plain(x, weights):
        return jnp.sin(x @ (weights.T if transposed else weights)).sum()

    found = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, weights)
    for one, expected in zip(found, jax.grad(plain, argnums=(0, 1))(x, weights), strict=True):
        np.testing.assert_allclose(one, expected, rtol=0, atol=2e-4 * np.abs(expected).max())


def test_gradients_pass_through_quantized_weights():
    x, weights = make_case(5, 256, 512, jnp.int8, False)
    x = jnp.asarray(x, jnp.float32)
    found = jax.grad(lambda x: project(x, weights, sharding_of(1), dtype=jnp.float32).sum())(x)
    expected = np.asarray(weights, np.float64).sum(1)
    np.testing.assert_allclose(found, np.tile(expected, (5, 1)), rtol=1e-5, atol=1e-2)


def test_it_serves_one_cpu_and_large_matrices():
    x, weights = jnp.ones((2, 256)), jnp.ones((256, 256))
    assert matmul_cpu.is_supported(x, weights, sharding_of(1))
    assert not matmul_cpu.is_supported(x, weights, sharding_of(2))
    assert not matmul_cpu.is_supported(x, weights[:, :64], sharding_of(1))
    assert not matmul_cpu.is_supported(jnp.ones((512, 256)), weights, sharding_of(1))
    assert not matmul_cpu.is_supported(x, weights.astype(jnp.float16), sharding_of(1))
    program = jax.jit(lambda x, w: project(x, w, sharding_of(1))).lower(x, weights)
    assert "dflash_matmul" in program.as_text()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
@pytest.mark.parametrize("rows", [1, 6, 40, 300])
def test_panels_change_nothing(rows, dtype):
    x, weights = make_case(rows, 300, 320, dtype, transposed=False)
    x = jnp.asarray(x, jnp.float32)
    panels = matmul_cpu.to_panels(weights)
    width = library_cpu.panel_columns()
    assert panels.shape == (320 // width, 300, width)
    multiply = jax.jit(matmul_cpu.matmul)
    np.testing.assert_array_equal(multiply(x, panels), multiply(x, weights))
