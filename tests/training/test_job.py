"""Preparing a training run: its prompts are those that decoding makes."""

import datetime
import io
import shutil

import pytest
from support import failure, write_lines

from dflash import assets, errors
from dflash.config import loader, train_schema
from dflash.loading import job as decode_jobs
from dflash.training import train_job

# The lines of Qwen3's template that `enable_thinking` decides, and one that prints the date.
TEMPLATE = """{{ strftime_now('%Y-%m-%d') }}
{% for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}{% if add_generation_prompt %}assistant: {% if enable_thinking is defined and
enable_thinking is false %}<think></think>{% endif %}{% endif %}"""
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def target(tmp_path):
    """The embedded target with another template, and without weights: a dry run reads none."""
    directory = tmp_path / "target"
    ignore = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(assets.__path__[0] + "/tiny_target", directory, ignore=ignore)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def prepare(target, *overrides, date=None, dry=True) -> train_job.TrainJob:
    heads = "drafter={name: medusa, checkpoint: random, architecture: {block_size: 8}}"
    base = f"target.checkpoint={target}", heads, "train.steps=10", "data.files=[a.jsonl]"
    config = loader.load(None, (*base, *overrides), train_schema.TrainRun)
    return train_job.prepare(config, date=date, dry=dry)


@pytest.mark.parametrize("thinking", ["false", "true"])
def test_prompts_are_those_of_decoding(target, thinking):
    overrides = f"target.checkpoint={target}", "drafter.name=none", f"prompts.thinking={thinking}"
    config = loader.load(
        "configs/tiny_dflash.yml", (*overrides, "prompts.text=[]", "prompts.chat=false")
    )
    decoding = decode_jobs.prepare(config, stdin=io.StringIO("Hi"), dry=True).tokenizer
    training = prepare(target, f"data.thinking={thinking}").tokenizer
    assert training.encode_chat(MESSAGES) == decoding.encode_chat(MESSAGES)
    assert training.render_chat(MESSAGES).endswith("<think></think>") == (thinking == "false")


def test_templates_print_the_date_of_the_run(target):
    tokenizer = prepare(target, date=datetime.date(2024, 2, 29)).tokenizer
    assert tokenizer.render_chat(MESSAGES).startswith("2024-02-29\n")


def rows_of(directory, count: int) -> str:
    """Writes answers that fill `count` rows of 32 tokens, and returns the path of the file."""
    lines = [{"prompt_ids": [7, number], "output_ids": [9] * 29 + [2]} for number in range(count)]
    return write_lines(directory / "answers.jsonl", lines)


@pytest.mark.parametrize(
    ("batch", "epochs", "steps"),
    [(9, 6, 11), (10, 6, 10), (15, 6, 7), (16, 6, 6), (16, 0.5, 1), (5, 1.1, 4), (2, 1.1, 9)],
)
def test_epochs_are_read_in_full(target, tmp_path, batch, epochs, steps):
    data = f"data.files=[{rows_of(tmp_path, 16)}]", f"data.data_dir={tmp_path}"
    data += "data.length=32", "data.held_out_percent=0", f"train.batch_size={batch}"
    length = "train.steps=null", f"train.epochs={epochs}"
    job = prepare(target, *data, *length, dry=False)
    assert job.training_rows.num_rows == 16
    assert job.steps() == steps


def test_epochs_are_those_of_the_decimal_number(target, tmp_path):
    """As floats, 1.1 × 100 is above 110, which would take a step of no data."""
    data = f"data.files=[{rows_of(tmp_path, 100)}]", f"data.data_dir={tmp_path}"
    data += "data.length=32", "data.held_out_percent=0", "train.batch_size=10"
    length = "train.steps=null", "train.epochs=1.1"
    assert prepare(target, *data, *length, dry=False).steps() == 11


@pytest.mark.parametrize("name", ["dflash", "dflash2", "dspark", "medusa"])
def test_one_key_decides_the_size_of_the_trained_blocks(target, name):
    sizes = "drafter.checkpoint=random", "drafter.architecture.block_size=16"
    rows = 17 if name == "dspark" else 16  # DSpark counts drafts.
    blocks = f"drafter.name={name}", "drafter.block_size=8"
    assert failure(prepare, target, *blocks, *sizes, kind=errors.ConfigError).startswith(
        f"drafter.block_size: 8, but blocks of {rows} rows are trained, by "
        "drafter.architecture.block_size"
    )
    same = () if name == "dspark" else ("drafter.block_size=16",)
    assert prepare(target, f"drafter.name={name}", *sizes, *same).task.learner.longest_path == rows
