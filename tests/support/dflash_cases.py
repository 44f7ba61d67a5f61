"""What the tests of the DFlash drafter share: shapes, their config.json, and blocks."""

import jax

from dflash.drafters.dflash import DFlash
from dflash.drafters.dflash_config import DFlashShape, LayerView
from dflash.drafters.parts.blocks import cut_blocks
from support.models import make_architecture

FULL, CAUSAL = LayerView(), LayerView(causal=True)
BLOCK = 6

SLIDE, WHOLE = "sliding_attention", "full_attention"
# The first layer slides, or the last one; or all do by a flag.
FIRST, LAST = (
    {"layer_types": list(types), "sliding_window": 3} for types in ((SLIDE, WHOLE), (WHOLE, SLIDE))
)
FLAG = {"dflash_config": {"use_swa": True, "swa_window_size": 5}}
NOT_CAUSAL = {"dflash_config": {"causal": False}}
# What config.json says -> what its two layers see.
VIEWS = {
    "nothing": ({}, (FULL, FULL)),
    "a window, but no layer that slides": ({"sliding_window": 3}, (FULL, FULL)),
    "layer types": (FIRST, (LayerView(3, causal=True), FULL)),
    "layer types, all bidirectional": (FIRST | {"is_causal": False}, (LayerView(3), FULL)),
    "layer types, bidirectional by the group": (
        FIRST | NOT_CAUSAL | {"sliding_window_non_causal": False},
        (LayerView(3), FULL),
    ),
    "the file before the group": (NOT_CAUSAL | {"is_causal": True}, (CAUSAL, CAUSAL)),
    "sliding layers marked causal": (
        LAST | {"sliding_window_non_causal": False},
        (FULL, LayerView(3, causal=True)),
    ),
    "sliding layers marked bidirectional": (
        LAST | {"sliding_window_non_causal": True},
        (FULL, LayerView(3)),
    ),
    "the flag alone": (FLAG, (LayerView(5), LayerView(5))),
    "the flag with layer types": (LAST | FLAG, (FULL, LayerView(5, causal=True))),
    "the flag with the window beside it": (
        {"sliding_window": 4, "dflash_config": {"use_swa": True}},
        (LayerView(4), LayerView(4)),
    ),
    "the flag off": ({"dflash_config": {"use_swa": False, "swa_window_size": 5}}, (FULL, FULL)),
    "causal": ({"dflash_config": {"causal": True}}, (CAUSAL, CAUSAL)),
    "causal and sliding": (
        FIRST | {"dflash_config": {"causal": True}},
        (LayerView(3, causal=True), CAUSAL),
    ),
}


def make_shape(*views, **changes):
    values = {
        "decoder": make_architecture(num_hidden_layers=len(views)), "block_size": BLOCK,
        "mask_token_id": 47, "target_layer_ids": (0, 2), "num_target_layers": 3, "views": views,
    }  # fmt: skip
    return DFlashShape(**(values | changes))


def make_config(num_layers=2, dflash_config=(), **changes):
    """A drafter's config.json in its older layout, which says nothing about windows."""
    config = DFlash.config_to_hf(make_shape(*[FULL] * num_layers))
    for name in ("layer_types", "sliding_window", "sliding_window_non_causal"):
        del config[name]
    own = {key: config["dflash_config"][key] for key in ("mask_token_id", "target_layer_ids")}
    return config | {"dflash_config": own | dict(dflash_config)} | changes


_cut = jax.jit(cut_blocks, static_argnames=("block_size", "mask_token_id"))


def cut(drafter, batch, anchors):
    return _cut(
        batch, anchors, block_size=drafter.block_size, mask_token_id=drafter.shape.mask_token_id
    )
