"""Tests of the choice between a kernel and its reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from dflash.kernels import implementation


def double(x, how, unsupported=None):
    """Doubles in the kernel and triples in the reference, so that they can be told apart."""

    def kernel(x_ref, doubled_ref):
        doubled_ref[...] = x_ref[...] * 2

    def pallas(x, interpret):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(kernel, out_shape=shape, interpret=interpret)(x)

    return implementation.run(
        how, x, reference=lambda x: x * 3, pallas=pallas, unsupported=unsupported
    )


@pytest.mark.parametrize(("how", "factor"), [("auto", 3), ("reference", 3), ("interpret", 2)])
def test_on_this_platform(how, factor):
    x = jnp.arange(1024.0).reshape(8, 128)
    np.testing.assert_array_equal(jax.jit(double, static_argnums=1)(x, how), factor * x)


def lowered_for_tpu(how, unsupported=None):
    traced = jax.jit(double, static_argnums=(1, 2)).trace(jnp.ones((8, 128)), how, unsupported)
    return traced.lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize(
    ("how", "kernel"), [("auto", True), ("pallas", True), ("reference", False)]
)
def test_the_lowering_platform_decides(how, kernel):
    assert ("tpu_custom_call" in lowered_for_tpu(how)) == kernel


def test_what_the_kernel_does_not_cover():
    assert "tpu_custom_call" not in lowered_for_tpu("auto", "op: too small")
    for how in ("pallas", "interpret"):
        with pytest.raises(ValueError, match=r"^op: too small; use implementation='reference'$"):
            double(jnp.ones((8, 128)), how, "op: too small")


def test_unknown_names():
    with pytest.raises(ValueError, match="implementation 'cuda' is not one of"):
        double(jnp.ones((8, 128)), "cuda")


def test_platforms_without_kernels_trace_the_reference_alone():
    assert [implementation.for_platform(name) for name in ("tpu", "cpu", "gpu", "unknown")] == [
        "auto", "reference", "reference", "reference",
    ]  # fmt: skip
