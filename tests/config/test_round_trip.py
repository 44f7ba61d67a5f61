import dataclasses
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.config import loader, schema, strict_yaml
from dflash.drafters.dflash_config import DFlashArchitecture, DFlashConfig
from dflash.drafters.eagle3_config import BeamTree, Eagle3Architecture, Eagle3Config

TEXTS = st.text(max_size=20) | st.sampled_from(
    [
        "off",
        "1e-3",
        "null",
        "~",
        "12:30",
        "- x",
        "a: b",
        "[x",
        "'",
        '"',
        "#",
        "x #y",
        "\n",
        " x ",
        "é\u2028\U0001f600",
    ]
)
NAMES = TEXTS.filter(bool)


def ints(low, high=schema.INT32_MAX):
    return st.integers(low, high)


def floats(low, high=schema.FLOAT32_MAX):
    return st.floats(low, high, allow_nan=False, allow_infinity=False)


ROPE_SCALINGS = st.builds(
    schema.RopeScaling,
    factor=floats(1.0),
    low_freq_factor=floats(0.0, 1.0),
    high_freq_factor=floats(1.5),
    original_max_position_embeddings=ints(1),
)
TARGET_SHAPES = st.builds(
    schema.TargetArchitecture,
    vocab_size=ints(1000),
    hidden_size=ints(1),
    intermediate_size=ints(1),
    num_hidden_layers=ints(50, schema.MAX_LAYERS),
    num_attention_heads=st.sampled_from([4, 8]),
    num_key_value_heads=st.sampled_from([1, 2, 4]),
    head_dim=st.sampled_from([2, 64]),
    max_position_embeddings=ints(1),
    rms_norm_eps=floats(0.0),
    rope_theta=floats(1.0),
    rope_scaling=st.none() | ROPE_SCALINGS,
    tie_word_embeddings=st.booleans(),
    eos_token_id=st.lists(ints(0, 999), max_size=3).map(tuple),
)
DRAFTER_SHAPES = st.builds(
    DFlashArchitecture,
    block_size=ints(8, 1024),
    mask_token_id=st.none() | ints(0, 999),
    target_layer_ids=st.none() | st.lists(ints(0, 49), min_size=1, unique=True).map(tuple),
)
DRAFTERS = st.just(schema.DrafterConfig()) | st.builds(
    DFlashConfig,
    name=st.just("dflash"),
    checkpoint=NAMES,
    block_size=st.none() | ints(2, 8),
    architecture=st.none() | DRAFTER_SHAPES,
)
DRAFTERS |= st.builds(
    Eagle3Config,
    name=st.just("eagle3"),
    checkpoint=NAMES,
    num_draft_tokens=ints(1, 1023),
    tree=st.none() | st.builds(BeamTree, budget=ints(1, 1024), top_k=ints(1, 64)),
    architecture=st.none() | st.builds(Eagle3Architecture, draft_vocab_size=ints(1, 999)),
)
DECODES = st.builds(
    schema.DecodeConfig,
    max_new_tokens=ints(1, 100),
    temperature=floats(0.0),
    top_p=floats(0.0, 1.0),
    seed=ints(0, 2**32 - 1),
    verify=st.sampled_from(["coupled", "rejection"]),
    stop_ids=st.lists(ints(0, 999), max_size=3).map(tuple),
    max_length=st.none() | ints(101, schema.MAX_TOKENS),
    page_size=st.sampled_from([8, 256]),
)
PROMPTS = st.builds(
    schema.PromptsConfig, text=st.lists(TEXTS, max_size=3).map(tuple), chat=st.booleans()
) | st.builds(schema.PromptsConfig, file=TEXTS)
AXES = st.lists(st.sampled_from(["data", "fsdp", "tensor"]), unique=True).map(tuple)
RUNS = st.builds(
    schema.DecodeRun,
    target=st.builds(
        schema.TargetConfig,
        name=st.sampled_from(["qwen3", "llama3"]),
        checkpoint=NAMES,
        architecture=TARGET_SHAPES,
    ),
    drafter=DRAFTERS,
    decode=DECODES,
    prompts=PROMPTS,
    sharding_rules=st.fixed_dictionaries(dict.fromkeys(schema.SHARDING_RULES, AXES)),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)


@settings(max_examples=50)
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
