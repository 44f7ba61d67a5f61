"""DFlare: DFlash in which each draft layer mixes the tapped target layers by weights of its own.

Source: arXiv 2606.02091 and Tencent/AngelSlim (`qwen_dflare.py`). The weights of a draft layer are
a softmax over the tapped layers, one norm for all draft layers follows, and attention has separate
projections for the keys and values of the context. Nothing else differs from DFlash.
"""

import jax
import jax.numpy as jnp

from dflash.drafters.dflare_config import DFlareShape
from dflash.drafters.dflash import DFlash
from dflash.layers.attention import ContextAttention
from dflash.layers.transformer import TransformerLayer, grouped_attention
from dflash.parallel import parameters

_FUSION = "layer_fusion_weights"
# Initial logit of one tapped layer per draft layer; the others start at zero. As in AngelSlim.
_FIRST_CHOICE = 2.0


class DFlare(DFlash):
    """DFlare drafter, whose state is the same as DFlash's."""

    hf_architectures = ("QwenDFlareDraftModel",)
    shape_class = DFlareShape

    def declare_context(self, **build):
        layers, taps = self.shape.decoder.num_hidden_layers, len(self.feature_layers)
        first = tuple(
            tuple(_FIRST_CHOICE * (tap == layer * taps // layers) for tap in range(taps))
            for layer in range(layers)
        )
        self.layer_fusion_weights = parameters.declare(
            (layers, taps), (None, None), stddev=0.0, offset=first, **build
        )

    @staticmethod
    def make_layer(shape, **build):
        form = shape.attention_form | {"takes_context": False}  # Rows of context have their own.
        attention = grouped_attention(shape.decoder, ContextAttention, **form, **build)
        return TransformerLayer(shape.decoder, attention=attention, **build)

    def context_rows(self, features, *, gather=False):
        """Mixes the tapped layers for each draft layer; see `DFlash.context_rows`."""
        taps = features.reshape(*features.shape[:-1], len(self.feature_layers), -1)
        shares = jax.nn.softmax(self.layer_fusion_weights[...].astype(jnp.float32), axis=1)
        mixed = jnp.einsum("btcd,lc->lbtd", taps, shares.astype(features.dtype))
        return [self.hidden_norm(rows) for rows in mixed]

    @staticmethod
    def checkpoint_name(path: str) -> str:
        return path if path == _FUSION else DFlash.checkpoint_name(path)
