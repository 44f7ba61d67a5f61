"""A distillation of a target with random weights, small enough for tests, and kills amid it."""

import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from support import write_lines

CONFIG = """
target: {{name: qwen3, checkpoint: random, architecture: {{
  vocab_size: 256, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 1,
  num_attention_heads: 4, num_key_value_heads: 2, head_dim: 16, max_position_embeddings: 512}}}}
drafter: {{name: dflash, checkpoint: random, architecture: {{
  num_hidden_layers: 1, block_size: 4, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 16,
  intermediate_size: 48, target_layer_ids: [0]}}}}
answers:
  files: [{questions}]
  decode: {{max_new_tokens: 12, batch_size: 4, page_size: 16, prefill_chunk: 64}}
data: {{length: 64, held_out_percent: 0, data_dir: {data_dir}}}
loss: {{num_anchors: 4}}
train: {{steps: 4, batch_size: 2, dtype: float32, checkpoint_every: 2, export_dtype: float32}}
evaluation: {{every: 2, batches: 0, prompts: 0}}
test: {{tasks: [math], prompts: 2,
  decode: {{max_new_tokens: 8, page_size: 16, prefill_chunk: 64}}}}
plan: {{chip: v5p}}
"""


ROWS_FOR_FOUR = ("train.batch_size=4",)  # processes


class Killed(BaseException):
    """In place of a signal that no code can catch."""


def write_config(directory: pathlib.Path) -> pathlib.Path:
    """Writes a config file, and questions beside it."""
    lines = [{"prompt": f"Question {number}?"} for number in range(14)]
    questions = write_lines(directory / "questions.jsonl", lines)
    path = directory / "config.yml"
    path.write_text(CONFIG.format(questions=questions, data_dir=directory / "data"))
    return path


def kill_at(owner: Any, name: str, when: int, main: Callable[[], Any]) -> None:
    """Calls `main` until the `when`-th call of a function of `owner`, which is never made."""
    calls, real = iter(range(1, when)), getattr(owner, name)

    def counted(*arguments, **options):
        if next(calls, None) is None:
            raise Killed
        return real(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, counted)
        with pytest.raises(Killed):
            main()
