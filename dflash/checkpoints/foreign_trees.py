"""Trees of weights under the names of other frameworks, such as those of a running trainer.

Three namings are known: Hugging Face's tensors, the models of Tunix (LoRA included), and MaxText's
decoder, with layers stacked or one by one. Each maps a parameter to an `Origin`: the arrays of the
tree from which it follows, and how.

Sources: tunix/models/qwen3/params.py and llama3/params.py of google-tunix 0.1.7;
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
        return TunixNames(flat, lora_alpha)
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


class TunixNames:
    """Names of the models of Tunix, whose projections to heads keep one dimension per head."""

    _RULES = (
        (r"embed_tokens\.embedding", "embedder.input_embedding"),
        (r"norm\.scale", "final_norm.w"),
        (r"lm_head\.kernel", "lm_head.w"),
        (r"(layers\.\d+)\.self_attn\.(\w_proj)\.kernel", r"\1.attn.\2.w"),
        (r"(layers\.\d+)\.self_attn\.(\w_norm)\.scale", r"\1.attn.\2.w"),
        (r"(layers\.\d+\.\w+_layernorm)\.scale", r"\1.w"),
        (r"(layers\.\d+\.mlp\.\w+_proj\.kernel)", r"\1"),
    )

    def __init__(self, flat: Mapping[str, Any], lora_alpha: float | None):
        """Creates the naming of a tree; see `find_naming`."""
        self._shapes = {name: tuple(array.shape) for name, array in flat.items()}
        self._lora_alpha = lora_alpha
        self._lora = {name[: -len(LORA_A)] for name in flat if name.endswith(LORA_A)}
        if self._lora and lora_alpha is None:
            raise errors.CheckpointError(
                f"weights: {min(self._lora)}{LORA_A!s}: LoRA parameters need their scale; give "
                "lora_alpha"
            )

    def origin(self, path: str, shape: tuple[int, ...]) -> Origin:
        """Returns the array of a parameter, with those of its LoRA if it has one."""
        name = _rename(self._RULES, path)
        # Heads are apart in the tree: [D, N, H] or [N, H, D] where the parameter is a matrix.
        stored = self._shapes.get(name, shape)
        heads_apart = name.endswith("_proj.w") and _is_split(stored, shape)
        stored = stored if heads_apart else shape
        if name not in self._lora:
            return Origin((name,), (stored,), _Reshaped(shape))
        rank = self._shapes[name + LORA_A][-1]
        names = name, name + LORA_A, name + LORA_B
        return Origin(names, (stored, None, None), _Merged(shape, self._lora_alpha / rank))

    def ignores(self, name: str) -> bool:
        """Returns False: the models have no other arrays."""
        return False


def _is_split(stored: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Returns whether `stored` splits one dimension of a matrix in two."""
    if len(stored) != 3 or len(shape) != 2:
        return False
    joined = {(stored[0], stored[1] * stored[2]), (stored[0] * stored[1], stored[2])}
    return tuple(shape) in joined


@dataclasses.dataclass(frozen=True)
class _Reshaped:
    """Reshapes an array to a parameter's shape."""

    shape: tuple[int, ...]

    def __call__(self, array: jax.Array) -> jax.Array:
        return array.reshape(self.shape)


@dataclasses.dataclass(frozen=True)
class _Merged:
    """Adds scale · A · B to an array, and reshapes it to a parameter's shape."""

    shape: tuple[int, ...]
    scale: float

    def __call__(self, array: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        rank = a.shape[-1]
        product = jnp.matmul(
            a.reshape(-1, rank).astype(jnp.float32),
            b.reshape(rank, -1).astype(jnp.float32),
            precision="highest",
        )
        return (array + self.scale * product.reshape(array.shape)).reshape(self.shape)


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
        if self._interleaves is None:
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
        attention = re.search(r"self_attn\.(\w)_proj", path)
        if attention is None:
            return MaxTextForm(shape), shape
        size = self._arch.head_dim
        if attention[1] == "o":
            return MaxTextForm(shape), (shape[0] // size, size, shape[1])
        interleaved = self._interleaves and attention[1] in "qk"
        scale = size**0.5 if interleaved and attention[1] == "q" else 1.0
        return MaxTextForm(shape, interleaved, scale), (shape[0], shape[1] // size, size)


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
