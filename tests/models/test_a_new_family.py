"""Target family with an attention, a cache, experts and a checkpoint layout of its own.

Even layers have grouped-query attention, whose projections are fused in checkpoints, and a dense
MLP. Odd layers attend to one latent array that all heads share, without positions, and mix experts,
each of which has tensors of its own in checkpoints. docs/targets.md describes the steps.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file
from support.distributions import install
from support.engines import decode, engine, random_prompts
from support.models import drafter, make_sharding

from dflash import errors
from dflash.checkpoints import checkpoint
from dflash.checkpoints.tensor_map import Stack, TensorRows
from dflash.config import registry
from dflash.config.schema import TargetArchitecture, TargetConfig, option
from dflash.kernels import paged_attention as paged
from dflash.layers import rotary
from dflash.layers.cache import CacheArray
from dflash.layers.linear import Linear
from dflash.loading import models
from dflash.models.decoder import Decoder
from dflash.parallel import parameters

# --- the family: what would be dflash/models/toy.py -----------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToyArchitecture(TargetArchitecture):
    """Architecture of a decoder, and of its odd layers."""

    num_experts: int = option(minimum=1, maximum=1024)
    latent_width: int = option(minimum=1, maximum=2**16)


class LatentAttention(nnx.Module):
    """Queries [B, T, N, L] meet one latent row [B, T, L] a position, as keys and as values."""

    def __init__(self, arch: ToyArchitecture, **build):
        heads, width = arch.num_attention_heads, arch.latent_width
        self.q_proj = Linear(arch.hidden_size, heads * width, ("embed", "heads"), **build)
        self.latent_proj = Linear(arch.hidden_size, width, ("embed", None), **build)
        self.o_proj = Linear(heads * width, arch.hidden_size, ("heads", "embed"), **build)
        self.width = width

    def cache_spec(self):
        return CacheArray(1, self.width, None)

    def project(self, normed, angles):
        del angles
        queries = self.q_proj(normed).reshape(*normed.shape[:2], -1, self.width)
        return queries, self.latent_proj(normed)

    def attend_pages(self, pages, page_table, start, tree_mask):
        page_size = pages.shape[2]
        capacity = page_table.shape[1] * page_size

        def attend(queries, latents):
            batch, length = latents.shape[:2]
            rows = start[:, None] + jnp.arange(length)
            written = paged.write_rows(
                pages, paged.row_index(page_table, rows, page_size), latents[None]
            )
            (context,) = paged.read_pages(written, page_table)
            mask = jnp.tril(jnp.ones((1, length, length), bool)) if tree_mask is None else tree_mask
            new = jnp.arange(capacity) - start[:, None]  # [B, positions]; row of each position
            among_new = jnp.take_along_axis(
                jnp.broadcast_to(mask, (batch, length, length)),
                jnp.clip(new, 0, length - 1)[:, None],
                axis=2,
            )
            visible = (new < 0)[:, None] | ((new < length)[:, None] & among_new)
            return self._attend(queries, context, visible), written

        return attend

    def attend_packed(self, segment_ids):
        length = segment_ids.shape[1]
        same = segment_ids[:, :, None] == segment_ids[:, None]

        def attend(queries, latents):
            return self._attend(
                queries, latents, same & jnp.tril(jnp.ones((length,) * 2, bool))
            ), None

        return attend

    def _attend(self, queries, context, visible):
        scores = jnp.einsum("btnl,bsl->bnts", queries, context) * self.width**-0.5
        weights = jax.nn.softmax(jnp.where(visible[:, None], scores, -1e30), axis=-1)
        return jnp.einsum("bnts,bsl->btnl", weights, context)

    def output(self, attended):
        return self.o_proj(attended.reshape(*attended.shape[:2], -1))


class ExpertLinear(nnx.Module):
    """A map for each expert: [..., E, in] -> [..., E, out]."""

    def __init__(self, experts: int, width: int, out: int, *, dtype, sharding):
        self.kernel = parameters.declare(
            (experts, width, out),
            ("expert", None, "mlp"),
            dtype=dtype,
            sharding=sharding,
            stddev=0.2,
        )

    def __call__(self, x):
        return jnp.einsum("...ed,edf->...ef", x, self.kernel[...])


class Experts(nnx.Module):
    """Every expert's output, weighted by the router."""

    def __init__(self, arch: ToyArchitecture, **build):
        experts, width, inner = arch.num_experts, arch.hidden_size, arch.intermediate_size
        self.gate = Linear(width, experts, ("embed", None), **build)
        self.up_proj = ExpertLinear(experts, width, inner, **build)
        self.down_proj = ExpertLinear(experts, inner, width, **build)

    def __call__(self, x):
        rows = jnp.broadcast_to(
            x[..., None, :], (*x.shape[:-1], self.gate.kernel.shape[1], x.shape[-1])
        )
        outputs = self.down_proj(jax.nn.silu(self.up_proj(rows)))
        return jnp.einsum("...e,...ed->...d", jax.nn.softmax(self.gate(x)), outputs)


class Toy(Decoder):
    """`ToyForCausalLM`."""

    hf_architectures = ("ToyForCausalLM",)
    hf_model_type = "toy"
    qk_norm = False
    architecture_class = ToyArchitecture

    def make_attention(self, i, **build):
        if i % 2 == 0:
            return super().make_attention(i, **build)
        return LatentAttention(self.arch, **build)

    def make_mlp(self, i, **build):
        return Experts(self.arch, **build) if i % 2 == 1 else super().make_mlp(i, **build)

    def checkpoint_name(self, path):
        layer, _, rest = path.rpartition(".self_attn.")
        if rest in ("q_proj.kernel", "k_proj.kernel", "v_proj.kernel") and self._is_even(layer):
            arch = self.arch
            kv = arch.num_key_value_heads * arch.head_dim
            queries = arch.num_attention_heads * arch.head_dim
            begin, count = {"q": (0, queries), "k": (queries, kv), "v": (queries + kv, kv)}[rest[0]]
            name = f"model.{layer}.self_attn.qkv_proj.weight"
            return TensorRows(name, begin, begin + count, of=queries + 2 * kv)
        layer, _, rest = path.rpartition(".mlp.")
        if rest in ("up_proj.kernel", "down_proj.kernel") and not self._is_even(layer):
            prefix, part = f"model.{layer}.mlp.experts", rest.removesuffix(".kernel")
            experts = range(self.arch.num_experts)
            return Stack(tuple(f"{prefix}.{expert}.{part}.weight" for expert in experts))
        return super().checkpoint_name(path)

    @staticmethod
    def _is_even(layer: str) -> bool:
        return int(layer.rpartition(".")[2]) % 2 == 0


# --- and what shows that it works -----------------------------------------------------------------

ARCH = ToyArchitecture(
    vocab_size=24,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
    rope_theta=1e4,
    num_experts=3,
    latent_width=12,
)
PROMPTS = random_prompts([9, 20, 3])
NEW = 14


def make_tensors():
    """Returns the tensors of a random checkpoint of the family."""
    rng = np.random.default_rng(0)
    width, inner = ARCH.hidden_size, ARCH.intermediate_size
    queries, kv = 4 * ARCH.head_dim, 2 * ARCH.head_dim
    shapes = {"embed_tokens": (24, width), "norm": (width,)}
    for i in range(ARCH.num_hidden_layers):
        layer = f"layers.{i}"
        shapes |= {f"{layer}.input_layernorm": (width,)}
        shapes |= {f"{layer}.post_attention_layernorm": (width,)}
        if i % 2 == 0:
            shapes |= {f"{layer}.self_attn.qkv_proj": (queries + 2 * kv, width)}
            shapes |= {f"{layer}.self_attn.o_proj": (width, queries)}
            shapes |= {f"{layer}.mlp.{part}_proj": (inner, width) for part in ("gate", "up")}
            shapes |= {f"{layer}.mlp.down_proj": (width, inner)}
            continue
        shapes |= {f"{layer}.self_attn.q_proj": (4 * ARCH.latent_width, width)}
        shapes |= {f"{layer}.self_attn.latent_proj": (ARCH.latent_width, width)}
        shapes |= {f"{layer}.self_attn.o_proj": (width, 4 * ARCH.latent_width)}
        shapes |= {f"{layer}.mlp.gate": (ARCH.num_experts, width)}
        for expert in range(ARCH.num_experts):
            shapes |= {f"{layer}.mlp.experts.{expert}.up_proj": (inner, width)}
            shapes |= {f"{layer}.mlp.experts.{expert}.down_proj": (width, inner)}
    shapes = {f"model.{name}": shape for name, shape in shapes.items()} | {"lm_head": (24, width)}
    return {
        f"{name}.weight": rng.normal(1.0 if "norm" in name else 0.0, 0.3, shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def dense_logits(tensors, tokens):
    """Computes the logits [V] after `tokens` in float64, without a cache."""
    weights = {name.removesuffix(".weight"): np.float64(value) for name, value in tensors.items()}
    causal = np.tril(np.ones((len(tokens),) * 2, bool))

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + ARCH.rms_norm_eps) * weights[name]

    def silu(x):
        return x / (1 + np.exp(-x))

    def attend(queries, keys, values):
        """Returns attention outputs [T, N · H] for arrays [T, N, H]."""
        scores = np.einsum("tnh,snh->nts", queries, keys) * queries.shape[-1] ** -0.5
        scores = np.exp(np.where(causal, scores, -np.inf))
        out = np.einsum("nts,snh->tnh", scores / scores.sum(-1, keepdims=True), values)
        return out.reshape(len(tokens), -1)

    def rotate(x):
        freqs = rotary.frequencies(ARCH.head_dim, ARCH.rope_theta)
        turned = (np.arange(len(tokens))[:, None] * freqs)[:, None]
        low, high = np.split(x, 2, axis=-1)
        cos, sin = np.cos(turned), np.sin(turned)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)

    x = weights["model.embed_tokens"][list(tokens)]
    for i in range(ARCH.num_hidden_layers):
        layer = f"model.layers.{i}"
        rows = norm(x, f"{layer}.input_layernorm")
        if i % 2 == 0:
            heads = (rows @ weights[f"{layer}.self_attn.qkv_proj"].T).reshape(len(rows), 8, -1)
            queries, keys, values = heads[:, :4], heads[:, 4:6], heads[:, 6:]
            keys, values = (np.repeat(each, 2, axis=1) for each in (rotate(keys), values))
            attended = attend(rotate(queries), keys, values)
        else:
            queries = (rows @ weights[f"{layer}.self_attn.q_proj"].T).reshape(len(rows), 4, -1)
            latent = (rows @ weights[f"{layer}.self_attn.latent_proj"].T)[:, None]
            attended = attend(queries, *[np.repeat(latent, 4, axis=1)] * 2)
        x = x + attended @ weights[f"{layer}.self_attn.o_proj"].T
        rows = norm(x, f"{layer}.post_attention_layernorm")
        mlp = f"{layer}.mlp"
        if i % 2 == 0:
            gated = silu(rows @ weights[f"{mlp}.gate_proj"].T) * (
                rows @ weights[f"{mlp}.up_proj"].T
            )
            x = x + gated @ weights[f"{mlp}.down_proj"].T
            continue
        shares = np.exp(rows @ weights[f"{mlp}.gate"].T)
        shares /= shares.sum(-1, keepdims=True)
        for expert in range(ARCH.num_experts):
            one = f"{mlp}.experts.{expert}"
            inner = silu(rows @ weights[f"{one}.up_proj"].T)
            x = x + shares[:, expert : expert + 1] * (inner @ weights[f"{one}.down_proj"].T)
    return norm(x, "model.norm")[-1] @ weights["lm_head"].T


def dense_decode(tensors, prompt):
    tokens = list(prompt)
    for _ in range(NEW):
        tokens.append(int(dense_logits(tensors, tokens).argmax()))
    return tuple(tokens[len(prompt) :])


@pytest.fixture
def registered(monkeypatch, tmp_path_factory):
    """The family, in a distribution that registers it."""
    entry = registry.Entry(f"{__name__}:Toy", "dflash.config.schema:TargetConfig")
    module = f"from dflash.config.registry import Entry\nTOY = {entry!r}\n"
    points = "[dflash.targets]\ntoy = toy_registered:TOY\n"
    directory = tmp_path_factory.mktemp("toy")
    install(monkeypatch, directory, points, {"toy_registered": module})


@pytest.fixture
def directory(tmp_path):
    directory = tmp_path / "toy"
    directory.mkdir()
    save_file(make_tensors(), directory / "model.safetensors")
    config = Toy.config_to_hf(ARCH)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def load(directory, sharding=None):
    config = TargetConfig(checkpoint=str(directory))
    source = models.find_target(config)
    sharding = sharding or make_sharding()
    target = models.build_target(config, source, dtype="float32", sharding=sharding)
    models.load_weights(target, source)
    return target


def test_every_strategy_decodes_it_as_a_dense_forward_does(registered, directory):
    target = load(directory)
    assert target.arch == ARCH
    wanted = [dense_decode(make_tensors(), prompt) for prompt in PROMPTS]
    # A chain that is copied, and a tree whose accepted path is moved within the pages.
    tree = drafter("dflash", arch=ARCH, block_size=8, tree=True)
    for model in (None, drafter("ngram", block_size=4), tree):
        run = engine(model, on=target, batch_size=2, sync_every=4)
        done = decode(run, PROMPTS, NEW)
        assert [one.output_ids for one in done] == wanted


def test_packed_rows_are_the_dense_forward_too(registered, directory):
    target = load(directory)
    tokens = np.array([PROMPTS[1]])
    hidden, _ = target.forward(tokens, np.arange(20)[None], np.ones((1, 20), np.int32))
    logits = target.unembed(hidden)[0, -1]
    np.testing.assert_allclose(logits, dense_logits(make_tensors(), PROMPTS[1]), atol=1e-4)


@pytest.mark.parametrize("mesh", [{}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_what_was_read_is_written_back(registered, directory, tmp_path, mesh):
    target = load(directory, make_sharding(**mesh))
    count = checkpoint.save_hf(
        target, tmp_path / "out", Toy.config_to_hf(ARCH), max_shard_bytes=9000
    )
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    written = {name: value for shard in shards for name, value in load_file(shard).items()}
    tensors = make_tensors()
    assert len(shards) > 1
    assert count == len(written) == len(tensors)
    for name, value in tensors.items():
        np.testing.assert_array_equal(written[name], value, err_msg=name)


def test_its_own_fields_are_checked(registered, directory):
    config = Toy.config_to_hf(ARCH) | {"num_experts": 0}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(errors.CheckpointError) as caught:
        load(directory)
    expected = "config.json: num_experts: expected an integer in [1, 1024], got 0"
    assert str(caught.value) == expected
