"""Targets beside transformers' own: one set of weights, and how both are run."""

import functools
import pathlib
import zlib
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from support.golden import import_transformers, load_target

WEIGHTS = "model.safetensors"


def make_pair(family: str, config: dict, directory: pathlib.Path):
    """A random model of transformers, and ours with the weights that it saved.

    Args:
      family: as transformers begins the names of its classes.
      config: fields of its config.
      directory: to save in.
    """
    _, transformers = import_transformers()
    kind = getattr(transformers, f"{family}ForCausalLM").config_class
    config = kind(**config, eos_token_id=[3, 7], pad_token_id=None)
    return save_random(getattr(transformers, f"{family}ForCausalLM")(config), directory)


def save_random(theirs, directory: pathlib.Path, std: float = 0.2):
    """Gives a model of transformers random weights; see `make_pair`."""
    import_transformers()
    theirs.save_pretrained(directory)
    shapes = {name: array.shape for name, array in load_file(directory / WEIGHTS).items()}
    save_weights(shapes, directory, std)
    return type(theirs).from_pretrained(directory).float().eval(), load_target(directory)


def save_weights(shapes: Mapping, directory: pathlib.Path, std: float = 0.2):
    """Writes random tensors, each drawn by its name, so that shapes suffice to write them again."""
    tensors = {}
    for name, shape in shapes.items():
        rng = np.random.default_rng([0, zlib.crc32(name.encode())])
        mean, spread = (1.0, 0.3) if "norm" in name else (0.0, std)
        if name.endswith("layer_scalar"):
            mean = 1.0
        tensors[name] = rng.normal(mean, spread, shape).astype(np.float32)
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})


def step(target, tokens, start, cache, *, feature_layers=(), count=None):
    """One jitted call; returns hidden states, features, logits and the cache.

    Args:
      count: rows of each sequence that are no padding; all unless given.
    """
    tokens = jnp.asarray(tokens, jnp.int32)
    positions = jnp.asarray(start)[:, None] + jnp.arange(tokens.shape[1])
    count = jnp.full(len(tokens), tokens.shape[1]) if count is None else jnp.asarray(count)
    return compiled(target, feature_layers)(tokens, positions, cache, count)


@functools.cache
def compiled(target, feature_layers):
    @jax.jit
    def call(tokens, positions, cache, count):
        output = target(tokens, positions, cache, feature_layers=feature_layers, count=count)
        return output.hidden, output.features, target.unembed(output.hidden), output.cache

    return call


def pad(sequences):
    """Sequences as one array; what follows a shorter one is arbitrary."""
    width = max(map(len, sequences))
    return np.stack([np.pad(tokens, (0, width - len(tokens)), mode="wrap") for tokens in sequences])


def reference(theirs, tokens, layers):
    """Logits and features of one sequence, by transformers, on its own."""
    torch, _ = import_transformers()
    with torch.no_grad():
        output = theirs(torch.from_numpy(tokens)[None], output_hidden_states=True)
    features = [output.hidden_states[i + 1][0].numpy() for i in layers]
    return output.logits[0].numpy(), np.concatenate(features, axis=-1) if features else None


def check_rows(ours, expected, rows):
    for mine, theirs, count in zip(ours, expected, rows, strict=True):
        np.testing.assert_allclose(mine[:count], theirs[:count], rtol=0, atol=1e-4)
