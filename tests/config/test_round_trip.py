import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.config import benchmark_schema, loader, schema, strict_yaml, train_schema

WORDS = [
    "off", "1e-3", "null", "~", "12:30", "- x", "a: b", "[x", "'", '"', "#", "x #y", "\n", " x ",
]  # fmt: skip
TEXTS = st.text(max_size=20) | st.sampled_from([*WORDS, "é\u2028\U0001f600"])
NAMES = TEXTS.filter(bool)


def ints(low, high=schema.INT32_MAX):
    return st.integers(low, high)


def floats(low, high=schema.FLOAT32_MAX):
    return st.floats(low, high, allow_nan=False, allow_infinity=False)


# Fields of every kind of value; those of architectures and drafters are met by the shipped configs.
DECODES = st.builds(
    schema.DecodeConfig,
    max_new_tokens=ints(1, 100),
    temperature=floats(0.0),
    seed=ints(0, 2**32 - 1),
    verify=st.sampled_from(["coupled", "rejection"]),
    stop_ids=st.lists(ints(0, 999), max_size=3).map(tuple),
    max_length=st.none() | ints(101, schema.MAX_TOKENS),
)
PROMPTS = st.builds(
    schema.PromptsConfig, text=st.lists(TEXTS, max_size=3).map(tuple), chat=st.booleans()
) | st.builds(schema.PromptsConfig, file=TEXTS)
AXES = st.lists(st.sampled_from(["data", "fsdp", "tensor"]), unique=True).map(tuple)
RUNS = st.builds(
    schema.DecodeRun,
    target=st.builds(schema.TargetConfig, checkpoint=NAMES),
    decode=DECODES,
    prompts=PROMPTS,
    sharding_rules=st.fixed_dictionaries(dict.fromkeys(schema.SHARDING_RULES, AXES)),
)
# One of every kind of target, drafter and command.
KINDS = {"train": train_schema.TrainRun, "benchmark": benchmark_schema.BenchmarkRun}
SHIPPED = (
    "tiny_dflash2 tiny_eagle3 qwen3_4b_dflash_tree qwen3_8b_autoregressive qwen3_4b_ngram "
    "gemma4_31b_dflash gpt_oss_20b_dflash kimi_k25_dflash minimax_m2_5_dflash random_tiny_hybrid "
    "muse_glimmer_30b_dflash2 qwen3_8_27b_dspark_redhatai train/qwen3_4b_eagle3 "
    "train/qwen3_4b_ubtree benchmark/tiny_trees benchmark/smollm2_135m_load"
).split()


@pytest.mark.parametrize("name", SHIPPED)
def test_what_a_shipped_config_resolves_to_loads_as_the_same(tmp_path, name):
    kind, path = KINDS.get(name.rpartition("/")[0], schema.DecodeRun), tmp_path / "config.yml"
    config = loader.load(f"configs/{name}.yml", schema=kind)
    path.write_text(loader.to_yaml(config), encoding="utf-8")
    assert loader.load(path, schema=kind) == config


@settings(max_examples=25)
@given(config=RUNS)
def test_the_resolved_yaml_loads_as_the_same_config(tmp_path_factory, config):
    path = tmp_path_factory.getbasetemp() / "config.yml"
    path.write_text(loader.to_yaml(config), encoding="utf-8")
    loaded = loader.load(path)
    assert loaded == config
    assert loader.config_hash(loaded) == loader.config_hash(config)


@settings(max_examples=50)
@given(text=NAMES.filter(lambda text: text not in ("null", "~")))
def test_any_text_arrives_from_the_command_line(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "minimal.yml"
    path.write_text("target: {checkpoint: x}\n")
    config = loader.load(path, [f"prompts.file={text}"])
    assert config.prompts.file == text or not text.strip()


SCALARS = st.none() | st.booleans() | ints(-(2**40)) | TEXTS | st.floats(allow_nan=False)


@settings(max_examples=100)
@given(content=st.dictionaries(NAMES, SCALARS | st.lists(SCALARS, max_size=3), max_size=4))
def test_dumped_content_parses_as_itself(content):
    node, problems = strict_yaml.parse(strict_yaml.dump(content), "f.yml")
    assert problems == []

    def plain(value):
        if isinstance(value, tuple):
            return [plain(item.value) for item in value]
        return value

    parsed = {key: plain(item.value) for key, item in node.value.items()}
    assert parsed == content
    assert str(parsed) == str(content)  # 1 == 1.0 == True, their texts differ


def test_the_hash_ignores_the_order_of_keys_and_nothing_else():
    config = schema.DecodeRun()
    turned = dataclasses.replace(
        config, sharding_rules=dict(reversed(list(config.sharding_rules.items())))
    )
    assert list(turned.sharding_rules) != list(config.sharding_rules)
    assert loader.config_hash(turned) == loader.config_hash(config)
    other = dataclasses.replace(config, decode=schema.DecodeConfig(seed=1))
    assert loader.config_hash(other) != loader.config_hash(config)
    assert len(loader.config_hash(config)) == 12


def test_the_hash_does_not_depend_on_how_a_value_was_written(tmp_path):
    path = tmp_path / "c.yml"
    hashes = set()
    for text in ("0", "0.0", "-0.0", "0e5"):
        path.write_text(f"target: {{checkpoint: x}}\ndecode: {{temperature: {text}}}\n")
        config = loader.load(path)
        assert math.copysign(1, config.decode.temperature) == 1
        hashes.add(loader.config_hash(config))
    assert len(hashes) == 1
