"""Overrides that reduce the shipped training recipes to seconds."""

# Random weights: token ids are bytes, so that no tokenizer is needed.
TARGET = (
    "target.name=qwen3",
    "target.checkpoint=random",
    "target.architecture={vocab_size: 256, hidden_size: 32, intermediate_size: 48, "
    "num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1, head_dim: 16, "
    "max_position_embeddings: 512, tie_word_embeddings: true, eos_token_id: [2]}",
)
TRAINING = (
    "data.length=256", "data.held_out_percent=20", "train.dtype=float32", "train.epochs=null",
    "train.steps=2", "train.batch_size=2", "evaluation.every=2", "evaluation.batches=1",
    "evaluation.prompts=2",
    "evaluation.decode={max_new_tokens: 4, batch_size: 2, page_size: 64, prefill_chunk: 64}",
)  # fmt: skip
DRAFTER = ("drafter.architecture.num_hidden_layers=1", "drafter.architecture.mask_token_id=6")
BLOCK = "loss.num_anchors=4", "drafter.architecture.block_size=4"
EAGLE3 = (
    "drafter.architecture={draft_vocab_size: 64, target_layer_ids: [0]}",
    "drafter.training_steps=2",
    "drafter.num_draft_tokens=2",
)
GENERIC = ("dflash2",)  # Recipes for any target, which the command line names.
REDUCED = {
    "dflash2": (*DRAFTER, *BLOCK, "drafter.architecture.num_target_features=1"),
    "qwen3_4b_dflash": (*DRAFTER, *BLOCK, "drafter.architecture.target_layer_ids=[0]"),
    "qwen3_4b_eagle3": EAGLE3,
    "qwen3_4b_ubtree": (
        *(*DRAFTER, *BLOCK, "drafter.architecture.target_layer_ids=[0]"),
        *("drafter.architecture.selector_hidden_size=8", "drafter.initialize_from=fresh"),
    ),
}
