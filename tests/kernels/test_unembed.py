"""Tests of unembedding: the kernel, interpreted, against plain JAX over whole logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.models import make_sharding
from support.tpu_compiler import CHIPS, compile_for, needs_compiler

from dflash.kernels import unembed, unembed_tpu
from dflash.kernels.unembed import Noise

WIDTH = 128
TILE_BYTES = unembed_tpu.TILE_BYTES


@pytest.fixture(autouse=True, scope="module")
def small_tiles():
    """Tiles of 256 tokens, so that small vocabularies have several."""
    unembed_tpu.TILE_BYTES = 256 * WIDTH * 4
    yield
    unembed_tpu.TILE_BYTES = TILE_BYTES


def arrays(rows, vocab, *, dtype=jnp.float32, transposed=False, whole=True):
    """Hidden states and weights; small whole numbers, whose products are exact and often tie."""
    rng = np.random.default_rng(rows * vocab)
    shapes = ((rows, WIDTH), (vocab, WIDTH) if transposed else (WIDTH, vocab))
    draw = (lambda s: rng.integers(-2, 3, s)) if whole else (lambda s: rng.normal(size=s))
    return [jnp.asarray(draw(shape), dtype) for shape in shapes]


def make_noise(rows, temperature):
    keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(7), i))(jnp.arange(rows))
    return Noise(jax.random.key_data(keys), jnp.resize(jnp.array(temperature), rows))


def run(how, *args, **options):
    return jax.jit(lambda *a: unembed.unembed(*a, implementation=how, **options))(*args)


def assert_same(a, b, rtol=1e-6):
    for field in ("token", "top_tokens"):
        np.testing.assert_array_equal(getattr(a, field), getattr(b, field), err_msg=field)
    for field in ("score", "logsumexp", "top_logits"):
        np.testing.assert_allclose(getattr(a, field), getattr(b, field), rtol, err_msg=field)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("how", ["reference", "interpret"])
def test_against_whole_logits(how, transposed):
    hidden, weights = arrays(5, 700, transposed=transposed)
    logits = np.asarray(hidden, np.float64) @ np.asarray(weights.T if transposed else weights)
    found = run(how, hidden, weights, transposed=transposed, num_top=4)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :4]
    np.testing.assert_array_equal(found.token, logits.argmax(axis=1))
    np.testing.assert_array_equal(found.score, logits.max(axis=1))
    np.testing.assert_array_equal(found.top_tokens, order)
    np.testing.assert_array_equal(found.top_logits, np.take_along_axis(logits, order, axis=1))
    peak = logits.max(axis=1)
    expected = peak + np.log(np.exp(logits - peak[:, None]).sum(axis=1))
    np.testing.assert_allclose(found.logsumexp, expected, 1e-6)


@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 64])
@pytest.mark.parametrize("vocab", [128, 511, 512, 513])
def test_the_kernel_is_the_reference(rows, vocab):
    inputs = arrays(rows, vocab)
    options = {"noise": make_noise(rows, [0.0, 0.7, 1.5]), "num_top": 3}
    assert_same(run("interpret", *inputs, **options), run("reference", *inputs, **options))


def test_bfloat16():
    inputs = arrays(17, 513, dtype=jnp.bfloat16, transposed=True, whole=False)
    options = {"transposed": True, "num_top": 2}
    interpreted = run("interpret", *inputs, **options)
    assert_same(interpreted, run("reference", *inputs, **options), rtol=1e-5)


def test_the_noise_is_that_of_the_whole_vocabulary():
    """So a draft drawn by the kernel is the token that plain sampling draws."""
    noise = make_noise(3, [1.0])
    counts = jnp.arange(100, 700, dtype=jnp.uint32)[None]
    keys = jax.random.wrap_key_data(noise.keys)
    expected = jax.vmap(lambda key: jax.random.gumbel(key, (1000,)))(keys)[:, 100:700]
    np.testing.assert_array_equal(unembed_tpu.gumbel(noise.keys, counts), expected)


def test_drawn_tokens_are_those_of_plain_sampling():
    inputs, noise = arrays(8, 600, whole=False), make_noise(8, [0.0, 0.5, 2.0])
    logits = jnp.dot(*inputs, precision="highest")
    keys = jax.random.wrap_key_data(noise.keys)
    gumbel = jax.vmap(lambda key: jax.random.gumbel(key, (600,)))(keys)
    warm = noise.temperature[:, None] > 0
    scores = jnp.where(
        warm, logits / jnp.where(warm, noise.temperature[:, None], 1) + gumbel, logits
    )
    expected = jnp.argmax(scores, axis=1)
    for how in ("reference", "interpret"):
        with jax.default_matmul_precision("highest"):
            np.testing.assert_array_equal(run(how, *inputs, noise=noise).token, expected)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_split_vocabulary_gives_the_same(transposed):
    sharding = make_sharding(tensor=4)
    hidden, weights = arrays(6, 1024, transposed=transposed)
    noise = make_noise(6, [0.0, 0.9])
    names = ("vocab", None) if transposed else (None, "vocab")

    def local(hidden, weights, keys, temperature):
        size = weights.shape[0 if transposed else 1]
        part = unembed.unembed(
            hidden,
            weights,
            transposed=transposed,
            noise=Noise(keys, temperature),
            num_top=5,
            first_token=sharding.index("vocab") * size,
        )
        return unembed.gather(part, sharding.axes("vocab"))

    row, matrix = (None,), (None, None)
    split = sharding.map(
        lambda *a: tuple(vars(local(*a)).values()),
        (matrix, names, matrix, row),
        (row, row, row, matrix, matrix),
    )
    found = unembed.Unembedded(*jax.jit(split)(hidden, weights, noise.keys, noise.temperature))
    options = {"transposed": transposed, "noise": noise, "num_top": 5}
    assert_same(found, run("reference", hidden, weights, **options))


@pytest.mark.parametrize(
    ("hidden", "weights", "options", "message"),
    [
        ((2, 8), (9, 100), {}, r"hidden \(2, 8\) does not fit weights \(9, 100\) \[D, V\]"),
        ((2, 8), (8, 100), {"transposed": True}, r"does not fit weights \(8, 100\) \[V, D\]"),
        ((2, 3, 8), (8, 100), {}, "expected 2-D"),
        ((2, 8), (8, 100), {"num_top": 101}, "num_top 101, expected 0 to 100"),
        ((2, 8), (8, 100), {"noise": (3, 2)}, r"expected \(2, 2\) and \(2,\)"),
    ],
)
def test_what_does_not_fit_is_named(hidden, weights, options, message):
    if "noise" in options:
        shape = options["noise"]
        options = {"noise": Noise(jnp.zeros(shape, jnp.uint32), jnp.zeros(shape[0]))}
    with pytest.raises(ValueError, match=message):
        unembed.unembed(jnp.zeros(hidden), jnp.zeros(weights), **options)


def test_more_than_vmem_holds_is_refused_with_the_sizes():
    hidden, weights = jnp.zeros((4096, 4096), jnp.bfloat16), jnp.zeros((4096, 256), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"4096 rows of 4096 \(64.0 MiB\).* exceed 48 MiB of VMEM"):
        unembed.unembed(hidden, weights, implementation="pallas")


@needs_compiler
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(("vocab", "transposed"), [(151936, True), (128256, False)])
def test_it_compiles_for_tpus(chip, vocab, transposed, monkeypatch):
    monkeypatch.setattr(unembed_tpu, "TILE_BYTES", TILE_BYTES)

    def run(hidden, weights, keys, temperature):
        noise = Noise(keys, temperature)
        return unembed.unembed(hidden, weights, transposed=transposed, noise=noise, num_top=8)

    compiled = compile_for(
        chip,
        run,
        [
            ((16, 4096), jnp.bfloat16),
            ((vocab, 4096) if transposed else (4096, vocab), jnp.bfloat16),
            ((16, 2), jnp.uint32),
            ((16,), jnp.float32),
        ],
    )
    # Nothing of the size of the logits is in memory.
    assert compiled.memory_analysis().temp_size_in_bytes < 16 * vocab * 4
