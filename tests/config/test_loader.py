import functools
import re

import pytest
from support.config_files import MINIMAL, problems

from dflash import errors
from dflash.config import benchmark_schema, loader, schema, serve_schema, train_schema
from dflash.drafters.dflash_config import DFlashConfig

# Who wins.


def test_later_wins(write):
    write("one.yml", "decode: {seed: 1, top_k: 1, sync_every: 1, batch_size: 2}\n")
    write("two.yml", "decode: {seed: 2, top_k: 2, sync_every: 2}\n")
    write("main.yml", f"base: [one.yml, two.yml]\n{MINIMAL}decode: {{seed: 3, top_k: 3}}\n")
    decode = loader.load("main.yml", ["decode.seed=4"]).decode
    assert (decode.seed, decode.top_k, decode.sync_every, decode.batch_size) == (4, 3, 2, 2)
    assert decode.page_size == schema.DecodeConfig().page_size


def test_bases_of_bases_come_first(write):
    write("a/deep.yml", "decode: {seed: 1, top_k: 1, sync_every: 1}\n")
    write("a/b/mid.yml", "base: [../deep.yml]\ndecode: {seed: 2, top_k: 2}\n")
    write("main.yml", "base: [a/b/mid.yml]\ntarget: {checkpoint: w}\ndecode: {seed: 3}\n")
    decode = loader.load("main.yml").decode
    assert (decode.seed, decode.top_k, decode.sync_every) == (3, 2, 1)


def test_lists_replace_and_mappings_merge(write):
    write("base.yml", "decode: {stop_ids: [1, 2]}\nsharding_rules: {mlp: [], vocab: [fsdp]}\n")
    write("main.yml", "base: [base.yml]\n" + MINIMAL + "decode: {stop_ids: [3]}\n")
    config = loader.load("main.yml", ["sharding_rules.vocab=[fsdp, tensor]"])
    assert config.decode.stop_ids == (3,)
    expected = {**schema.SHARDING_RULES, "mlp": (), "vocab": ("fsdp", "tensor")}
    assert config.sharding_rules == expected


def test_null_takes_a_group_back(write):
    write("c.yml", "target: {checkpoint: w, architecture: {vocab_size: 1}}\n")
    assert loader.load("c.yml", ["target.architecture=null"]).target.architecture is None


@pytest.mark.parametrize(
    "overrides", [["drafter.name=none"], ["drafter.name=none", "decode.seed=0"]]
)
def test_another_drafter_starts_its_group_afresh(write, overrides):
    write("c.yml", MINIMAL + "drafter: {name: dflash, checkpoint: d, block_size: 8}\n")
    assert loader.load("c.yml", overrides).drafter == schema.DrafterConfig()


@pytest.mark.parametrize("order", [1, -1])
def test_a_new_drafter_keeps_the_keys_given_with_it(write, order):
    write("c.yml", MINIMAL + "drafter: {name: none}\n")
    overrides = ["drafter.name=dflash", "drafter.checkpoint=d"][::order]
    assert loader.load("c.yml", overrides).drafter == DFlashConfig(checkpoint="d")


# Types.


def test_an_integer_is_a_number_but_not_the_other_way_round(write):
    config = loader.load(write("c.yml"), ["decode.temperature=1"])
    assert type(config.decode.temperature) is float
    assert problems("c.yml", "decode.seed=3.0") == [
        "command line: decode.seed: expected an integer in "
        "[-9223372036854775808, 9223372036854775807], got 3.0"
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *((text, (text,)) for text in ("Hello", "yes", "null", "Question: why?", "a=b")),
        *((text, (text,)) for text in ('He said: "hi" # twice', "[unfinished")),
        ("[yes, 12, 'a, b']", ("yes", "12", "a, b")),
        ("[]", ()),
    ],
)
def test_texts_arrive_as_typed(write, text, expected):
    write("c.yml", MINIMAL + "prompts: {text: [old]}\n")
    assert loader.load("c.yml", [f"prompts.text={text}"]).prompts.text == expected


def test_a_bare_value_on_the_command_line_is_a_list_of_one(write):
    config = loader.load(write("c.yml"), ["decode.stop_ids=7", "sharding_rules.mlp=fsdp"])
    assert config.decode.stop_ids == (7,)
    assert config.sharding_rules["mlp"] == ("fsdp",)


def test_a_flow_mapping_on_the_command_line_merges(write):
    write("c.yml", MINIMAL + "decode: {seed: 5, top_k: 6}\n")
    decode = loader.load("c.yml", ["decode={seed: 7, stop_ids: [1]}"]).decode
    assert (decode.seed, decode.top_k, decode.stop_ids) == (7, 6, (1,))


# Where files are looked for.


def test_a_file_as_given_comes_before_a_shipped_one(write):
    write("configs/qwen3_4b_dflash.yml", "target: {checkpoint: mine}\n")
    assert loader.load("configs/qwen3_4b_dflash.yml").target.checkpoint == "mine"


def test_a_base_beside_the_file_comes_before_a_shipped_one(write):
    write("c.yml", "base: [models/qwen3_4b.yml]\n")
    assert loader.load("c.yml").target.checkpoint == "hf:Qwen/Qwen3-4B"
    write("models/qwen3_4b.yml", "target: {checkpoint: mine}\n")
    assert loader.load("c.yml").target.checkpoint == "mine"


# Other schemas.


def test_a_null_name_infers_and_resets_nothing(write):
    """Unlike another name, which leaves no key of the group behind."""
    write("c.yml", "target: {name: qwen3, checkpoint: weights}\n")
    target = loader.load("c.yml", ["target.name=null"]).target
    assert (target.name, target.checkpoint) == (None, "weights")
    with pytest.raises(errors.ConfigError, match=r"target\.checkpoint: required"):
        loader.load("c.yml", ["target.name=llama3"])


def test_one_source_of_prompts_replaces_another_of_an_earlier_layer(write):
    write("c.yml", MINIMAL + "prompts: {text: [a, b], chat: true}\n")
    prompts = loader.load("c.yml", ["prompts.file=p.jsonl"]).prompts
    assert (prompts.text, prompts.file, prompts.chat) == ((), "p.jsonl", True)
    write("d.yml", "base: [c.yml]\nprompts: {dataset: math}\n")
    prompts = loader.load("d.yml").prompts
    assert (prompts.text, prompts.dataset) == ((), "math")
    assert loader.load("d.yml", ["prompts.text=c"]).prompts.dataset is None
    # Nothing given is no source.
    for nothing in ("prompts.file=null", "prompts.text=[]"):
        assert loader.load("d.yml", [nothing]).prompts.dataset == "math"


def test_one_way_of_forcing_acceptance_replaces_the_other():
    path = "benchmark/qwen3_4b_trace.yml"
    load = functools.partial(loader.load, path, schema=benchmark_schema.BenchmarkRun)
    assert load(["trace=t.json"]).acceptance == ()
    assert load(["acceptance=[math500]"]).trace is None


@pytest.mark.parametrize("schema_class", [schema.DecodeRun, serve_schema.ServeRun])
def test_a_checkpoint_in_place_of_a_config_is_the_target(schema_class, tmp_path):
    """As in target.checkpoint; other commands ask for a config."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    shipped = "assets/tiny_target"
    for path in ("hf:Qwen/Qwen3-4B", tmp_path / "model", shipped, "wheel:p/m.gguf", "m.gguf"):
        config = loader.load(path, ["decode.seed=3"], schema_class)
        assert (config.target.checkpoint, config.drafter.name) == (str(path), "none")
        assert (config.prompts.chat, config.decode.seed) == (None, 3)
        with pytest.raises(errors.ConfigError, match=r"CONFIG target\.checkpoint="):
            loader.load(path, (), train_schema.TrainRun)


def test_a_python_file_returns_a_config_dict(tmp_path):
    path = tmp_path / "c.py"
    path.write_text(
        "import ml_collections\n\ndef get_config():\n"
        "    config = ml_collections.ConfigDict({'base': ['tiny_dflash.yml']})\n"
        "    config.decode = ml_collections.ConfigDict({'seed': 3, 'stop_ids': (1, 2)})\n"
        "    return config\n"
    )
    config = loader.load(path, ["decode.top_k=5"])
    assert (config.decode.seed, config.decode.stop_ids, config.decode.top_k) == (3, (1, 2), 5)
    assert config == loader.load(
        "tiny_dflash.yml", ["decode.seed=3", "decode.stop_ids=[1,2]", "decode.top_k=5"]
    )


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("x = 1", "c.py: defines no get_config(), which returns the config"),
        ("1 / 0", "c.py: ZeroDivisionError: division by zero"),
        ("def get_config(): return {}", "c.py: AttributeError: "),
        ("import ml_collections\ndef get_config(): return ml_collections.ConfigDict({'a': 1})",
         "c.py as YAML:1: a: unknown key"),
    ],
)  # fmt: skip
def test_a_python_file_that_is_no_config_is_one_line(tmp_path, program, message):
    path = tmp_path / "c.py"
    path.write_text(program)
    with pytest.raises(errors.ConfigError, match=re.escape(message)):
        loader.load(path)
