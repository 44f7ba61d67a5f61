"""The shape of a drafter's transformer layers for a target of any architecture."""

from dflash.config import checks
from dflash.config.schema import DraftLayers, TargetArchitecture
from dflash.drafters.parts import compatibility

_MLP_RATIO = 3  # of Qwen3 0.6B, 1.7B and 8B
_MOST_KV_HEADS = 8  # of every dense Qwen3


def for_target(
    target: TargetArchitecture,
    options: DraftLayers,
    *,
    num_hidden_layers: int,
    hidden_size: int | None = None,
    tie_word_embeddings: bool | None = None,
) -> TargetArchitecture:
    """The layers of a fresh drafter, with what `options` leave out filled in by their rules.

    Args:
      target: only what every target has is read: vocabulary, width, context length, ids that end
        a sequence and whether the embedding is the output head.
      options: the layers as the config states them.
      num_hidden_layers: of the drafter.
      hidden_size: width of the drafter; None for the target's.
      tie_word_embeddings: None for as in the target.
    Raises:
      ConfigError: heads do not divide into groups, or into rotary halves.
    """
    width = hidden_size or target.hidden_size
    heads = options.num_attention_heads or _default_heads(width, options.head_dim)
    tied = target.tie_word_embeddings if tie_word_embeddings is None else tie_word_embeddings
    decoder = TargetArchitecture(
        vocab_size=target.vocab_size,
        hidden_size=width,
        intermediate_size=options.intermediate_size or _MLP_RATIO * width,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=options.num_key_value_heads or min(heads, _MOST_KV_HEADS),
        head_dim=options.head_dim,
        max_position_embeddings=target.max_position_embeddings,
        rms_norm_eps=options.rms_norm_eps,
        rope_theta=options.rope_theta,
        rope_scaling=options.rope_scaling,
        tie_word_embeddings=tied,
        eos_token_id=target.eos_token_id,
    )
    compatibility.check_options(checks.shape_problems(decoder))
    return decoder


def _default_heads(width: int, head_dim: int) -> int:
    """The smallest power of two of heads that are together at least `width` wide."""
    return 1 << (-(-width // head_dim) - 1).bit_length()
