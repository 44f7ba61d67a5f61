"""Drafters with parts of their own: a mask embedding, another width, a draft vocabulary.

Each drafter must draft as one without such parts does over a target that is changed alike.
"""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support import failure
from support.dflash_cases import FULL, make_shape
from support.golden import build_drafter
from support.models import (
    check_same_weights,
    make_architecture,
    make_sampling,
    make_sharding,
    make_target,
    random_module,
)
from support.training import observed, whole_rows

from dflash import errors
from dflash.checkpoints import checkpoint
from dflash.config.train_schema import LossConfig
from dflash.drafters.dflare_config import DFlareShape
from dflash.drafters.dflash import DFlash
from dflash.drafters.dflash2 import DFlash2
from dflash.drafters.dflash2_config import DFlash2Shape
from dflash.drafters.dflash_config import DFlashConfig
from dflash.drafters.dspark import DSpark
from dflash.drafters.dspark_config import DSparkShape
from dflash.drafters.parts.blocks import Anchors
from dflash.inference.logits.sampling import SequenceSampler
from dflash.parallel import parameters

BUILD = {"dtype": jnp.float32, "sharding": make_sharding()}
BASE = make_shape(FULL)
WIDTH, DRAFTED = BASE.decoder.hidden_size, np.arange(1, 40, 2)  # of 48 tokens
SAMPLED = SequenceSampler(make_sampling([0.8, 0.8]))


make = functools.partial(random_module, seed=1)


def assign(drafter, values):
    parameters.assign(drafter, {path: jnp.asarray(value) for path, value in values.items()})


def values_of(drafter):
    return {path: np.asarray(leaf.get_value()) for path, leaf in parameters.named_arrays(drafter)}


def draft(drafter, heads, features):
    """Returns the drafts after the features of ten tokens, and the hidden states of the block."""

    @jax.jit
    def run():
        state = observed(drafter, features, heads)
        anchors, count = jnp.array([5, 9]), jnp.full(2, features.shape[1])
        proposal, _ = drafter.draft(state, anchors, count, SAMPLED, heads)
        return proposal.tokens, drafter.run_block(state, anchors, count, heads)[0]

    return run()


def features_of(drafter, width=WIDTH):
    rng, taps = np.random.default_rng(0), len(drafter.feature_layers)
    return jnp.asarray(rng.normal(size=(2, 10, taps, width)).astype(jnp.float32))


def flat(features):
    return features.reshape(*features.shape[:2], -1)


def test_a_mask_embedding_replaces_the_target_s():
    plain = make(DFlash, BASE)
    own = make(DFlash, dataclasses.replace(BASE, mask_embedding=True))
    row = np.random.default_rng(1).normal(size=WIDTH).astype(np.float32)
    assign(own, values_of(plain) | {"mask_embedding": row})
    target, mask = make_target(), BASE.mask_token_id
    changed = types.SimpleNamespace(
        table_rows=lambda tokens: jnp.where((tokens == mask)[..., None], row, target.embed(tokens)),
        head_products=target.unembed,
    )
    rows = flat(features_of(plain))
    found, wanted = draft(own, target, rows), draft(plain, changed, rows)
    np.testing.assert_array_equal(found[0], wanted[0])
    np.testing.assert_allclose(found[1], wanted[1], atol=1e-5)
    assert not np.allclose(found[1], draft(plain, target, rows)[1], atol=1e-3)


@pytest.mark.parametrize("stored", ["model.safetensors", "mask_embedding.pt"])
def test_files_with_a_mask_embedding(stored, tmp_path):
    plain, directory = make(DFlash, BASE), tmp_path / "drafter"
    checkpoint.save(plain, directory, DFlash.config_to_hf(BASE))
    if stored.endswith(".pt"):
        (directory / stored).write_bytes(b"")
    else:
        row = {"mask_embedding": np.arange(WIDTH, dtype=np.float32)}
        save_file(load_file(directory / stored) | row, directory / stored)
    build = functools.partial(build_drafter, DFlashConfig(checkpoint=str(directory)))
    if stored.endswith(".pt"):
        said = failure(build, make_architecture())
        assert "mask_embedding.pt: pickles are not read" in said
        return
    drafter = build(make_architecture())
    np.testing.assert_array_equal(drafter.mask_embedding[...], np.arange(WIDTH))
    again = DFlash.architecture_from_hf(DFlash.config_to_hf(drafter.shape))
    assert again == drafter.shape
    assert again.mask_embedding


def test_a_target_of_another_width():
    """The projection ignores the added half of each feature; embedding and head are copies."""
    plain, target = make(DFlash, BASE), make_target()
    own = make(DFlash, dataclasses.replace(BASE, target_hidden_size=2 * WIDTH))
    values, taps = values_of(plain), len(plain.feature_layers)
    kernel = values["fc.kernel"].reshape(taps, WIDTH, WIDTH)
    ends = {
        "embed_tokens.embedding": target.embed_tokens.embedding[...],
        "lm_head.kernel": target.lm_head.kernel[...],
    }
    wide = {"fc.kernel": np.pad(kernel, ((0, 0), (0, WIDTH), (0, 0))).reshape(-1, WIDTH)}
    assign(own, values | ends | wide)
    features = features_of(own, 2 * WIDTH)
    found, wanted = (
        draft(own, None, flat(features)),
        draft(plain, target, flat(features[..., :WIDTH])),
    )
    np.testing.assert_array_equal(found[0], wanted[0])
    np.testing.assert_allclose(found[1], wanted[1], atol=1e-5)
    shape = DFlash.architecture_from_hf(DFlash.config_to_hf(own.shape))
    assert shape == own.shape
    assert shape.fit(make_architecture(hidden_size=2 * WIDTH)) == shape
    with pytest.raises(errors.CheckpointError, match=r"hidden size 64 \(target: 32\)"):
        shape.fit(make_architecture())
    mixing = DFlareShape(**vars(BASE)).to_hf() | {"target_hidden_size": 64}
    with pytest.raises(errors.CheckpointError, match="target_hidden_size: 64 is not supported"):
        DFlareShape.from_hf(mixing)


CONDITIONED = {
    "dspark": (DSpark, DSparkShape, {"markov_rank": 4, "markov_head_type": "gated"}),
    "dflash2": (
        DFlash2,
        DFlash2Shape,
        {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 3},
    ),
}
SUCCESSORS = ("markov_head.markov_w2.embedding", "candidate_selector.successor_codebook.embedding")


@pytest.mark.parametrize("name", CONDITIONED)
def test_conditioned_drafters_with_a_draft_vocabulary(name, tmp_path):
    """Tokens outside of it have no chance, as if the target's head ruled them out."""
    kind, shape_class, own = CONDITIONED[name]
    plain = make(kind, shape_class(**vars(BASE), **own))
    shape = dataclasses.replace(plain.shape, draft_vocab_size=DRAFTED.size)
    fewer, target, values = kind(shape, **BUILD), make_target(), values_of(plain)
    for path in SUCCESSORS:
        if path in values:
            values[path] = values[path][DRAFTED]
    known = np.isin(np.arange(48), DRAFTED)
    tables = {"d2t": DRAFTED - np.arange(DRAFTED.size), "t2d": known}
    head = {"lm_head.kernel": np.asarray(target.lm_head.kernel[...])[:, DRAFTED]}
    assign(fewer, values | {"d2t": tables["d2t"].astype(np.int32), "t2d": known} | head)
    only = types.SimpleNamespace(
        table_rows=target.embed, head_products=lambda x: jnp.where(known, target.unembed(x), -1e9)
    )
    rows = flat(features_of(plain))
    found, wanted = draft(fewer, target, rows), draft(plain, only, rows)
    np.testing.assert_array_equal(found[0], wanted[0])
    assert np.isin(found[0], DRAFTED).all()
    checkpoint.save(fewer, tmp_path / "out", kind.config_to_hf(shape))
    again = kind(kind.architecture_from_hf(checkpoint.read_config(tmp_path / "out")), **BUILD)
    checkpoint.load(again, tmp_path / "out")
    check_same_weights(again, fewer)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (DFlash, BASE),
        (DFlash2, DFlash2Shape(**vars(BASE), selector_top_k=4, conv_group_size=8)),
        *(
            (DSpark, DSparkShape(**vars(BASE), markov_rank=4, markov_head_type=kind))
            for kind in ("vanilla", "rnn")
        ),
    ],
)
@pytest.mark.parametrize("from_anchor", [False, True])
def test_the_anchor_s_row_drafts_or_does_not(kind, shape, from_anchor):
    shape = dataclasses.replace(shape, sample_from_anchor=from_anchor)
    drafter, target = make(kind, shape), make_target()
    count = shape.block_size - 1 + from_anchor
    assert (drafter.num_draft_tokens, drafter.longest_path) == (count, count + 1)
    rows = flat(features_of(drafter))
    (drafts, block), anchors = draft(drafter, target, rows), jnp.array([5, 9])
    hidden = block[:, 1 - from_anchor :]
    assert drafts.shape == hidden.shape[:2] == (2, count)
    logits, positions = target.unembed(hidden), jnp.tile(11 + jnp.arange(count), (2, 1))
    if kind is DSpark:  # The head has a memory of all rows of the block, the anchor's included.
        vectors, memory = [], drafter.fresh_memory(2)
        tokens = [anchors] * (2 - from_anchor) + list(drafts.T[:-1])
        condition = jax.jit(drafter.condition)
        for previous, row in zip(tokens, block.swapaxes(0, 1), strict=True):
            vector, memory = condition(previous, row, memory)
            vectors.append(vector)
        logits = drafter.corrected(logits, jnp.stack(vectors[1 - from_anchor :], axis=1))
    if kind is not DFlash2:
        np.testing.assert_array_equal(drafts, SAMPLED.propose(logits, positions)[0])
    index = jnp.array([[2, 4]], jnp.int32)
    batch = whole_rows(jnp.arange(12)[None], jnp.pad(rows[:1], ((0, 0), (0, 2), (0, 0))))
    anchors = Anchors(index, jnp.ones((1, 2), bool))

    @jax.jit
    def train():
        loss, _ = drafter.loss(batch, target, None, LossConfig(), anchors=anchors)
        return drafter.run_drafted(batch, target, anchors), loss

    (blocks, outputs), loss = train()
    assert (outputs.shape[2], blocks.labels.shape[2]) == (shape.block_size, count)
    np.testing.assert_array_equal(blocks.labels[0, :, 0], [3, 5])
    assert np.isfinite(loss)
