"""Preparing a training run: its prompts are those that decoding makes."""

import datetime
import io
import shutil

import pytest

from dflash import assets
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


def prepare(target, *overrides, date=None) -> train_job.TrainJob:
    overrides = f"target.checkpoint={target}", *overrides
    config = loader.load("configs/train/tiny_medusa.yml", overrides, train_schema.TrainRun)
    return train_job.prepare(config, date=date, dry=True)


@pytest.mark.parametrize("thinking", ["false", "true"])
def test_prompts_are_those_of_decoding(target, thinking):
    overrides = f"target.checkpoint={target}", "drafter.name=none", f"prompts.thinking={thinking}"
    config = loader.load("configs/tiny_medusa.yml", overrides)
    decoding = decode_jobs.prepare(config, stdin=io.StringIO("Hi"), dry=True).tokenizer
    training = prepare(target, f"data.thinking={thinking}").tokenizer
    assert training.encode_chat(MESSAGES) == decoding.encode_chat(MESSAGES)
    assert training.render_chat(MESSAGES).endswith("<think></think>") == (thinking == "false")


def test_templates_print_the_date_of_the_run(target):
    tokenizer = prepare(target, date=datetime.date(2024, 2, 29)).tokenizer
    assert tokenizer.render_chat(MESSAGES).startswith("2024-02-29\n")
