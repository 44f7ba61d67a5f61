"""Strategies of a benchmark: overrides of the drafter group, files, or drafters of their own."""

import pytest
from support import failure

from dflash import errors
from dflash.config import benchmark_schema, loader

CONFIG = """
target: {checkpoint: random, name: qwen3, architecture: {vocab_size: 99, hidden_size: 8,
  intermediate_size: 8, num_hidden_layers: 4, num_attention_heads: 2, num_key_value_heads: 1,
  head_dim: 4, max_position_embeddings: 64}}
drafter: {name: dflash, checkpoint: random, architecture: {num_hidden_layers: 2, block_size: 8}}
tasks: [math]
"""


def load(tmp_path, strategies, *overrides):
    path = tmp_path / "c.yml"
    path.write_text(CONFIG + strategies)
    return loader.load(path, overrides, benchmark_schema.BenchmarkRun)


def test_a_strategy_starts_from_the_drafter_of_its_name(tmp_path):
    config = load(
        tmp_path,
        "strategies: {dflash: , short: {block_size: 4, architecture: {num_hidden_layers: 1}},"
        " plain: {name: none}, other: {name: eagle3, checkpoint: random}}",
    )
    found = config.strategies
    assert found["dflash"] == config.drafter
    assert found["short"].block_size == 4
    assert found["short"].architecture.num_hidden_layers == 1
    assert found["short"].architecture.block_size == 8
    assert found["plain"].name == "none"
    assert found["other"].name == "eagle3"
    assert found["other"].architecture is None


def test_the_key_says_which_drafter_unless_the_name_does(tmp_path):
    config = load(tmp_path, "strategies: {eagle3: {checkpoint: random}, none: {name: dflash}}")
    assert config.strategies["eagle3"].name == "eagle3"
    assert config.strategies["none"] == config.drafter


def test_a_strategy_may_be_a_file(tmp_path):
    (tmp_path / "d.yml").write_text("drafter: {name: dflash, checkpoint: /elsewhere}")
    config = load(tmp_path, f"strategies: {{x: {tmp_path}/d.yml}}")
    assert config.strategies["x"].checkpoint == "/elsewhere"
    assert config.strategies["x"].architecture == config.drafter.architecture


def test_a_shipped_file_must_fit_the_target(tmp_path):
    wrong = r"strategies.x.architecture.mask_token_id: 151669 is not in the target's vocabulary"
    with pytest.raises(errors.ConfigError, match=wrong):
        load(tmp_path, "strategies: {x: configs/drafters/qwen3_4b_dflash.yml}")


def test_the_command_line_reaches_into_a_strategy(tmp_path):
    config = load(tmp_path, "strategies: {short: {block_size: 4}}", "strategies.short.block_size=2")
    assert config.strategies["short"].block_size == 2
    config = load(tmp_path, "strategies: {short: {block_size: 4}}", "drafter.checkpoint=/there")
    assert config.strategies["short"].checkpoint == "/there"


def test_what_was_resolved_loads_again(tmp_path):
    config = load(tmp_path, "strategies: {dflash: , short: {block_size: 4}, none: }")
    path = tmp_path / "again.yml"
    path.write_text(loader.to_yaml(config))
    again = loader.load(path, schema=benchmark_schema.BenchmarkRun)
    assert again == config
    assert loader.config_hash(again) == loader.config_hash(config)


@pytest.mark.parametrize(
    ("strategies", "message"),
    [
        ("{x: {blok_size: 4}}", "unknown key; did you mean 'strategies.x.block_size'?"),
        ("{x: {name: dflsh}}", "strategies.x.name: unknown name 'dflsh'; did you mean 'dflash'?"),
        ("{x: {block_size: 9}}", "9 exceeds strategies.x.architecture.block_size=8"),
        ("{x: {block_size: auto}}\nstudy: {name: verify}",
         "strategies.x.block_size: auto depends on"),
        ("{x: {block_size: auto}}\nacceptance: [gsm8k]",
         "strategies.x.block_size: auto depends on"),
        ("{x: {checkpoint: null}}", "strategies.x.checkpoint: required"),
        ("{x: 3}", "strategies.x: expected a mapping"),
        ("{x: gone.yml}", "strategies.x: gone.yml: no such file"),
        ("3", "strategies: expected a mapping"),
    ],
)  # fmt: skip
def test_a_wrong_strategy_is_one_line_with_its_place(tmp_path, strategies, message):
    problem = failure(load, tmp_path, f"strategies: {strategies}", kind=errors.ConfigError)
    assert message in problem
    assert "c.yml:" in problem


def test_a_key_that_is_no_name_needs_one_where_nothing_is_shared(tmp_path):
    path = tmp_path / "c.yml"
    path.write_text("target: {checkpoint: /x}\ntasks: [math]\nstrategies: {eagl3: }\n")
    given = path, (), benchmark_schema.BenchmarkRun
    problem = failure(loader.load, *given, kind=errors.ConfigError)
    assert "unknown name 'eagl3'; did you mean 'eagle3'?" in problem
