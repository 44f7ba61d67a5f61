"""Meta's drafter for Muse Glimmer beside transformers' own, with windows that hide keys."""

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from support.golden import import_transformers
from support.models import make_architecture, make_sharding, zeros
from support.parity import WEIGHTS, save_weights

from dflash.checkpoints import checkpoint
from dflash.drafters.dflash import DFlash
from dflash.drafters.dflash_config import DFlashConfig

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "block_size": 8,
    "mask_token_id": 47,
    "target_layer_ids": [0, 2],
}
MIXED = ["sliding_attention", "full_attention"]
COMMITTED = (9, 2, 3)  # Rows before each block.


class Table:
    """A target's embedding without the target."""

    def __init__(self, rows):
        self.rows = rows

    def table_rows(self, tokens):
        return jnp.asarray(self.rows)[tokens]


def run_theirs(model, cache, rows, block, position):
    """Hidden states of a block after `rows` of context, as transformers' decoding computes them."""
    torch, _ = import_transformers()
    count = rows.shape[1] + block.shape[1]
    cache.set_previous_accepted_tokens(rows.shape[1])
    with torch.no_grad():
        hidden = model(
            noise_embeds=torch.from_numpy(block),
            context_hidden_states=torch.from_numpy(rows),
            position_ids=torch.arange(position, position + count)[None],
            attention_mask=torch.ones(1, position + count, dtype=torch.long),
            cache=cache,
        ).last_hidden_state
    cache.crop(-block.shape[1])
    return hidden.numpy()


@pytest.mark.parametrize(("window", "types"), [(5, None), (3, MIXED)])
def test_blocks_see_the_keys_that_transformers_shows_them(window, types, tmp_path):
    _, transformers = import_transformers()
    config = transformers.MuseGlimmerAssistantConfig(
        **SIZES, sliding_window=window, layer_types=types, attn_implementation="eager"
    )
    transformers.MuseGlimmerAssistantModel(config).save_pretrained(tmp_path)
    shapes = {name: array.shape for name, array in load_file(tmp_path / WEIGHTS).items()}
    save_weights(shapes, tmp_path)
    theirs = transformers.MuseGlimmerAssistantModel.from_pretrained(tmp_path).float().eval()
    cache = transformers.cache_utils.DFlashCache(config=theirs.config)
    cache.activate_past_recording()
    build = {"dtype": jnp.float32, "sharding": make_sharding()}
    hf = checkpoint.read_config(tmp_path)
    ours = DFlash.create(DFlashConfig(), hf, make_architecture(), **build)
    checkpoint.load(ours, tmp_path)

    rng = np.random.default_rng(0)
    heads = Table(rng.normal(size=(48, 32)).astype(np.float32))
    features = rng.normal(size=(1, sum(COMMITTED), 64)).astype(np.float32)
    block = heads.rows[[[7] + [47] * 7]]
    state, position = zeros(ours.init_state(1, 64)), 0
    for count in COMMITTED:
        rows, tokens = features[:, position : position + count], jnp.zeros((1, count + 1), int)
        expected = run_theirs(theirs, cache, rows, block, position)
        start, committed = jnp.array([position]), jnp.array([count])
        state = ours.observe(state, start, tokens, committed, jnp.asarray(rows), heads)
        position += count
        hidden, _ = ours.run_block(state, jnp.array([7]), jnp.array([position]), heads)
        np.testing.assert_allclose(hidden, expected, rtol=0, atol=1e-5)
