"""Trees of weights under the names of other frameworks, such as those of a running trainer.

Three namings are known: Hugging Face's tensors, the models of Tunix (LoRA included), and MaxText's
decoder, with layers stacked or one by one. Each maps a parameter to an `Origin`: the arrays of the
tree from which it follows, and how.

Sources: tunix/models/{qwen2,qwen3,llama3,gemma3}/ of google-tunix 0.1.7;
maxtext/checkpoint_conversion/utils/param_mapping.py of maxtext 0.2.5.
"""

import dataclasses
import fnmatch
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from dflash import errors
from dflash.checkpoints import tensor_map

LORA_A, LORA_B = "_lora_a", "_lora_b"
# Dimension of a stacked parameter that counts layers: MaxText's default of `param_scan_axis`.
LAYER_AXIS = 1


@dataclasses.dataclass(frozen=True)
class Origin:
    """Arrays of a tree that form a parameter.

    Attributes:
      names: Names of the arrays in the tree.
      shapes: Shape of each array; None accepts any.
      form: Function from the arrays, without their dimension of layers, to the parameter. Equal for
        parameters that are formed alike.
      layer: Layer to take from stacked arrays; None if they hold one layer.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...] | None, ...]
    form: Callable[..., jax.Array]
    layer: int | None = None

    def compute(self, arrays: Sequence[jax.Array], layer: Any = None) -> jax.Array:
        """Computes the parameter; `layer` may be an array in place of the attribute."""
        layer = self.layer if layer is None else layer
        if layer is not None:
            arrays = [
                jax.lax.dynamic_index_in_dim(array, layer, LAYER_AXIS, keepdims=False)
                for array in arrays
            ]
        return self.form(*arrays)


class Naming(Protocol):
    """Names and shapes of parameters in the trees of one framework."""

    def origin(self, path: str, shape: tuple[int, ...]) -> Origin:
        """Returns the origin of the parameter of this shape at a dotted path.

        Raises:
          KeyError: The framework has no such parameter.
        """

    def ignores(self, name: str) -> bool:
        """Returns whether an array that no parameter needs is expected in the tree."""


def flatten(tree: Any) -> dict[str, Any]:
    """Returns the arrays of a tree by dotted path.

    Args:
      tree: Module or state of nnx, or nested mappings and sequences, whose keys may be dotted
        paths. Only the parameters of a module are returned.
    """
    if isinstance(tree, nnx.Module):
        tree = nnx.state(tree, nnx.Param)
    return dict(_leaves(tree, ()))


def find_naming(
    module: nnx.Module, flat: Mapping[str, Any], *, lora_alpha: float | None = None
) -> Naming:
    """Returns the naming that a tree follows.

    Args:
      module: Model whose parameters are named.
      flat: Arrays of the tree by dotted path.
      lora_alpha: Numerator of the scale of LoRA parameters; the denominator is their rank.
    Raises:
      CheckpointError: The tree follows none of the namings, or its LoRA parameters lack a scale.
    """
    if any(name.endswith("token_embedder.embedding") for name in flat):
        return MaxTextNames(module, flat)
    if "embedder.input_embedding" in flat:
        return TunixNames(module, flat, lora_alpha)
    if any(name.endswith(".weight") for name in flat):
        return HfNames(module)
    some = ", ".join(map(repr, itertools.islice(flat, 3))) or "no arrays"
    raise errors.CheckpointError(
        f"weights: {some}: expected the names of Hugging Face (model.norm.weight), of Tunix "
        "(final_norm.w) or of MaxText (decoder.decoder_norm.scale)"
    )


# --- Hugging Face -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class HfNames:
    """Names of a checkpoint's tensors; see `tensor_map`."""

    module: nnx.Module

    def origin(self, path: str, shape: tuple[int, ...]) -> Origin:
        """Returns the tensors that hold a parameter."""
        pieces = tensor_map.pieces(tensor_map.source_of(self.module, path), path, shape)
        rows = tuple((piece.lead, piece.first, piece.count) for piece in pieces)
        whole = len(pieces) == 1 and pieces[0].is_whole
        form = _Pieces(None if whole else rows, pieces[0].transposed)
        return Origin(
            tuple(piece.name for piece in pieces), tuple(piece.shape for piece in pieces), form
        )

    def ignores(self, name: str) -> bool:
        """Returns whether checkpoints hold the tensor beside the parameters."""
        suffixes = getattr(self.module, "ignored_checkpoint_suffixes", ())
        patterns = [*self.module.ignored_checkpoint_names, *(f"*{suffix}" for suffix in suffixes)]
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


@dataclasses.dataclass(frozen=True)
class _Pieces:
    """Joins rows of tensors to a parameter.

    Attributes:
      rows: Leading index, first row and number of rows of each piece; None for one whole tensor.
      transposed: Swap the last two dimensions.
    """

    rows: tuple[tuple[tuple[int, ...], int, int], ...] | None
    transposed: bool

    def __call__(self, *tensors: jax.Array) -> jax.Array:
        array = tensors[0]
        if self.rows is not None:
            groups: dict[tuple[int, ...], list[jax.Array]] = {}
            for (lead, first, count), tensor in zip(self.rows, tensors, strict=True):
                groups.setdefault(lead, []).append(tensor[first : first + count])
            joined = [jnp.concatenate(group) for group in groups.values()]
            array = jnp.stack(joined) if any(groups) else joined[0]
        return array.swapaxes(-1, -2) if self.transposed else array


# --- Tunix --------------------------------------------------------------------------------------


_TUNIX_RULES = (
    (r"embed_tokens\.embedding", "embedder.input_embedding"),
    (r"norm\.scale", "final_norm.w"),
    (r"lm_head\.kernel", "lm_head.w"),
    (r"(layers\.\d+)\.self_attn\.(\w_proj)\.kernel", r"\1.attn.\2.w"),
    (r"(layers\.\d+)\.self_attn\.(\w)_proj\.bias", r"\1.attn.\2_bias"),
    (r"(layers\.\d+)\.self_attn\.(\w_norm)\.scale", r"\1.attn.\2.w"),
    (r"(layers\.\d+\.\w+_layernorm)\.scale", r"\1.w"),
    (r"(layers\.\d+\.mlp\.\w+_proj\.kernel)", r"\1"),
    (r"(layers\.\d+\.mlp)\.gate\.kernel", r"\1.router.kernel"),
    (r"(layers\.\d+\.mlp)\.experts\.(\w+_proj)\.kernel", r"\1.\2"),
)
_GEMMA_RULES = (
    (r"norm\.scale", "final_norm.scale"),
    (r"(layers\.\d+)\.self_attn\.q_norm\.scale", r"\1.attn._query_norm.scale"),
    (r"(layers\.\d+)\.self_attn\.k_norm\.scale", r"\1.attn._key_norm.scale"),
    (r"(layers\.\d+)\.self_attn\.([qkv])_proj\.kernel", r"\1.attn.\2_einsum.w"),
    (r"(layers\.\d+)\.self_attn\.o_proj\.kernel", r"\1.attn.attn_vec_einsum.w"),
    (r"(layers\.\d+)\.input_layernorm\.scale", r"\1.pre_attention_norm.scale"),
    (r"(layers\.\d+)\.post_attention_layernorm\.scale", r"\1.post_attention_norm.scale"),
    (r"(layers\.\d+)\.(\w+)_feedforward_layernorm\.scale", r"\1.\2_ffw_norm.scale"),
    *_TUNIX_RULES,
)


class TunixNames:
    """Names of the models of Tunix, whose projections to heads keep one dimension per head.

    Gemma's projections to heads are stored as [N, D, H], and keys and values, or all three, in one
    array.
    """

    def __init__(self, module: nnx.Module, flat: Mapping[str, Any], lora_alpha: float | None):
        """Creates the naming of a tree; see `find_naming`."""
        self._head_dim = module.arch.head_dim
        self._rules = _GEMMA_RULES if "final_norm.scale" in flat else _TUNIX_RULES
        self._names, self._lora_alpha = flat.keys(), lora_alpha
        ranks = {name[: -len(LORA_A)]: array for name, array in flat.items() if LORA_A in name}
        self._ranks = {name: array.shape[-1] for name, array in ranks.items()}
        if self._ranks and lora_alpha is None:
            raise errors.CheckpointError(
                f"weights: {min(self._ranks)}{LORA_A!s}: LoRA parameters need their scale; give "
                "lora_alpha"
            )

    def origin(self, path: str, shape: tuple[int, ...]) -> Origin:
        """Returns the array of a parameter, with those of its LoRA if it has one."""
        shape, name = tuple(shape), _rename(self._rules, path)
        stored, form = _heads_apart(path, shape, self._head_dim), TunixForm(shape)
        projection = re.fullmatch(r"(.*\.)([qkv])_einsum\.w", name)
        if projection:
            stored = stored[1], stored[0], stored[2]
            form = TunixForm(shape, input_inside=True)
            for joined in ("kv", "qkv"):
                whole = f"{projection[1]}{joined}_einsum.w"
                if projection[2] in joined and whole in self._names:
                    name, stored = whole, (len(joined), *stored)
                    form = dataclasses.replace(form, part=joined.index(projection[2]))
        if name not in self._ranks:
            return Origin((name,), (stored,), form)
        form = dataclasses.replace(form, lora_scale=self._lora_alpha / self._ranks[name])
        return Origin((name, name + LORA_A, name + LORA_B), (stored, None, None), form)

    def ignores(self, name: str) -> bool:
        """Returns False: the models have no other arrays."""
        return False


@dataclasses.dataclass(frozen=True)
class TunixForm:
    """Converts an array of Tunix to a parameter.

    Attributes:
      shape: Shape of the parameter.
      part: Index of the parameter in an array of several; None for an array of its own.
      input_inside: The array is [N, D, H] where the parameter is [D, N · H].
      lora_scale: Factor of the product of LoRA parameters.
    """

    shape: tuple[int, ...]
    part: int | None = None
    input_inside: bool = False
    lora_scale: float = 0.0

    def __call__(self, array: jax.Array, *lora: jax.Array) -> jax.Array:
        if lora:
            array = array + self.lora_scale * self._product(*lora).reshape(array.shape)
        if self.part is not None:
            array = array[self.part]
        if self.input_inside:
            array = array.swapaxes(0, 1)
        return array.reshape(self.shape)

    def _product(self, a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        product = jnp.tensordot(a, b, axes=1, precision="highest")
        return jnp.moveaxis(product, 0, -2) if self.input_inside else product


# --- MaxText ------------------------------------------------------------------------------------


class MaxTextNames:
    """Names of MaxText's decoder; layers are stacked (`scan_layers`) or one by one.

    MaxText rotates adjacent numbers of a head where Hugging Face rotates its halves, and stores
    queries divided by the root of the head's size, in the families with
    `maxtext_interleaves_heads`.
    """

    _RULES = (
        (r"embed_tokens\.embedding", "token_embedder.embedding"),
        (r"norm\.scale", "decoder.decoder_norm.scale"),
        (r"lm_head\.kernel", "decoder.logits_dense.kernel"),
        (r"layers\.(\d+)\.self_attn\.q_(proj\.kernel|norm\.scale)", r"\1|self_attention.query_\2"),
        (r"layers\.(\d+)\.self_attn\.k_(proj\.kernel|norm\.scale)", r"\1|self_attention.key_\2"),
        (r"layers\.(\d+)\.self_attn\.v_(proj\.kernel)", r"\1|self_attention.value_\2"),
        (r"layers\.(\d+)\.self_attn\.o_(proj\.kernel)", r"\1|self_attention.out_\2"),
        (r"layers\.(\d+)\.mlp\.gate_proj\.kernel", r"\1|mlp.wi_0.kernel"),
        (r"layers\.(\d+)\.mlp\.up_proj\.kernel", r"\1|mlp.wi_1.kernel"),
        (r"layers\.(\d+)\.mlp\.down_proj\.kernel", r"\1|mlp.wo.kernel"),
        (r"layers\.(\d+)\.mlp\.gate\.kernel", r"\1|moe_block.gate.kernel"),
        (r"layers\.(\d+)\.mlp\.experts\.gate_proj\.kernel", r"\1|moe_block.wi_0"),
        (r"layers\.(\d+)\.mlp\.experts\.up_proj\.kernel", r"\1|moe_block.wi_1"),
        (r"layers\.(\d+)\.mlp\.experts\.down_proj\.kernel", r"\1|moe_block.wo"),
        (r"layers\.(\d+)\.input_layernorm\.scale", r"\1|pre_self_attention_layer_norm.scale"),
        (
            r"layers\.(\d+)\.post_attention_layernorm\.scale",
            r"\1|post_self_attention_layer_norm.scale",
        ),
    )

    def __init__(self, module: nnx.Module, flat: Mapping[str, Any], *, stacked: bool | None = None):
        """Creates the naming.

        Args:
          module: Target.
          flat: Arrays of the tree by dotted path; empty for a tree that is about to be written.
          stacked: Whether layers are stacked; None if the tree shows it.
        Raises:
          CheckpointError: MaxText's form of this family is not known.
        """
        self._interleaves = module.maxtext_interleaves_heads
        if self._interleaves is None or len({type(layer.mlp) for layer in module.layers}) > 1:
            raise errors.CheckpointError(
                f"weights: MaxText's form of {module.hf_architectures[0]} is not supported"
            )
        first = next((name for name in flat if name.endswith("token_embedder.embedding")), "")
        self._prefix = first.removesuffix("token_embedder.embedding")
        self._arch = module.arch
        start = f"{self._prefix}decoder.layers."
        self._stacked = any(name.startswith(start) for name in flat) if stacked is None else stacked

    def origin(self, path: str, shape: tuple[int, ...]) -> Origin:
        """Returns the array of a parameter, and its layer in the array if layers are stacked."""
        layer, _, name = _rename(self._RULES, path).rpartition("|")
        form, stored = self._form(path, tuple(shape))
        if not layer:
            return Origin((self._prefix + name,), (stored,), form)
        name = name.replace("_proj.", ".")
        if not self._stacked:
            return Origin((f"{self._prefix}decoder.layers_{layer}.{name}",), (stored,), form)
        stored = (*stored[:LAYER_AXIS], self._arch.num_hidden_layers, *stored[LAYER_AXIS:])
        return Origin((f"{self._prefix}decoder.layers.{name}",), (stored,), form, int(layer))

    def ignores(self, name: str) -> bool:
        """Returns False: the decoder has no other arrays."""
        return False

    def _form(self, path: str, shape: tuple[int, ...]) -> tuple["MaxTextForm", tuple[int, ...]]:
        """Returns the form of a parameter and its shape in the tree, without layers."""
        size, attention = self._arch.head_dim, re.search(r"self_attn\.([qk])_proj", path)
        interleaved = self._interleaves and attention is not None
        scale = size**0.5 if interleaved and attention[1] == "q" else 1.0
        return MaxTextForm(shape, interleaved, scale), _heads_apart(path, shape, size)


@dataclasses.dataclass(frozen=True)
class MaxTextForm:
    """Converts between an array of MaxText, of one layer, and a parameter.

    Attributes:
      shape: Shape of the parameter.
      interleaved: The halves of each head alternate in the array.
      scale: Factor from the array to the parameter.
    """

    shape: tuple[int, ...]
    interleaved: bool = False
    scale: float = 1.0

    def __call__(self, array: jax.Array) -> jax.Array:
        if self.interleaved:
            array = jnp.concatenate([array[..., ::2], array[..., 1::2]], axis=-1)
        if self.scale != 1.0:
            array = (array.astype(jnp.float32) * self.scale).astype(array.dtype)
        return array.reshape(self.shape)

    def inverse(self, parameter: jax.Array, stored: tuple[int, ...]) -> jax.Array:
        """Returns the array of a parameter, in its shape in the tree."""
        array = parameter.reshape(stored)
        if self.scale != 1.0:
            array = (array.astype(jnp.float32) / self.scale).astype(array.dtype)
        if self.interleaved:
            halves = jnp.split(array, 2, axis=-1)
            array = jnp.stack(halves, axis=-1).reshape(stored)
        return array


def _heads_apart(path: str, shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Returns the shape of a parameter, whose heads have a dimension of their own in the tree."""
    projection = re.search(r"self_attn\.(\w)_proj\.kernel", path)
    if projection is None:
        return shape
    if projection[1] == "o":
        return shape[0] // size, size, shape[1]
    return shape[0], shape[1] // size, size


def _rename(rules: Iterable[tuple[str, str]], path: str) -> str:
    for pattern, name in rules:
        match = re.fullmatch(pattern, path)
        if match:
            return match.expand(name)
    raise KeyError(path)


def _leaves(tree: Any, path: tuple[str, ...]) -> Iterable[tuple[str, Any]]:
    if isinstance(tree, nnx.Variable):
        tree = tree.get_value()
    if isinstance(tree, Mapping):
        children: Iterable[tuple[Any, Any]] = tree.items()
    elif isinstance(tree, list | tuple):
        children = enumerate(tree)
    else:
        yield ".".join(path), tree
        return
    for key, child in children:
        parts = key if isinstance(key, tuple) else (key,)
        yield from _leaves(child, (*path, *map(str, parts)))
