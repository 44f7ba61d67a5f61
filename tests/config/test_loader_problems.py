"""Exact messages of the loader about bad configs."""

import os

import pytest
from support.config_files import MINIMAL, problems

from dflash.config.benchmark_schema import BenchmarkRun
from dflash.config.registry import DRAFTERS

SEED = "decode.seed: expected an integer in [-9223372036854775808, 9223372036854775807]"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("decode.sead=1", "decode.sead: unknown key; did you mean 'decode.seed'?"),
        ("max_length=9", "max_length: unknown key; did you mean 'decode.max_length'?"),
        ("target.block_size=9",
         "target.block_size: unknown key; did you mean 'drafter.block_size'?"),
        ("drafter.architecture.vocab_size=9", "drafter.architecture.vocab_size: unknown key; "
         "did you mean 'target.architecture.vocab_size'?"),
        ("mesh.z=1", "mesh.z: unknown key; expected one of data, fsdp, tensor, expert"),
        ("decode.copy=1", "decode.copy: unknown key; expected one of temperature, top_k, "
         "top_p, min_p, presence_penalty, frequency_penalty, repetition_penalty, seed, "
         "max_new_tokens, min_new_tokens, verify, lookup, stop_ids, ignore_eos, baseline, exact, "
         "batch_size, sync_every, max_length, page_size, num_pages, kv_dtype, prefill_chunk, "
         "prefix_cache, partial_dispatches"),
        ("decode.seed=abc", f"{SEED}, got 'abc'"),
        ("decode.seed=true", f"{SEED}, got true"),
        ("decode.seed=010", f"{SEED}, got '010'"),
        ("decode.seed=", f"{SEED}, got nothing"),
        ("decode.seed=[1]", f"{SEED}, got a list"),
        ("decode.seed=null", f"{SEED}, got null"),
        ("decode.batch_size=0", "decode.batch_size: expected an integer in [1, 65536], got 0"),
        ("decode.top_p=1.5", "decode.top_p: expected a number in [0, 1], got 1.5"),
        ("decode.temperature=.nan", "decode.temperature: expected a number >= 0, got nan"),
        ("decode.temperature=.inf", "decode.temperature: expected a number >= 0, got inf"),
        ("decode.temperature=1e39", "decode.temperature: expected a number in "
         "[0, 3.40282e+38], got 1e+39"),
        ("decode.temperature=hot", "decode.temperature: expected a number >= 0, got 'hot'"),
        ("decode.ignore_eos=yes", "decode.ignore_eos: expected true or false, got 'yes'"),
        ("decode.ignore_eos=1", "decode.ignore_eos: expected true or false, got 1"),
        ("decode.verify=coupld", "decode.verify: expected one of coupled, rejection, "
         "got 'coupld'; did you mean 'coupled'?"),
        ("dtype=float23", "dtype: expected one of float32, bfloat16, got 'float23'; "
         "did you mean 'float32'?"),
        ("decode.stop_ids=[1, -2]", "decode.stop_ids[1]: expected an integer >= 0, got -2"),
        ("decode.stop_ids=x", "decode.stop_ids: expected an integer >= 0, got 'x'"),
        ("decode.stop_ids=[1", "decode.stop_ids: expected a list of integers >= 0, "
         "got '[1' (not valid YAML)"),
        ("decode.max_length=x", "decode.max_length: expected an integer in [2, 16777216] or null, "
         "got 'x'"),
        ("decode.top_k=2147483648", "decode.top_k: expected an integer in [0, 2147483647], "
         "got 2147483648"),
        ("decode.batch_size=1000000000000", "decode.batch_size: expected an integer in [1, 65536], "
         "got 1000000000000"),
        ("decode.stop_ids=[2147483648]", "decode.stop_ids[0]: expected an integer in "
         "[0, 2147483647], got 2147483648"),
        ("decode=3", "decode: expected a mapping, got 3"),
        ("prompts.text.x=3", "prompts.text: expected a list of strings, got a mapping"),
        ("sharding_rules=[1]", "sharding_rules: expected a mapping to lists of strings, "
         "got a list"),
        ("sharding_rules.mlp=[[a]]", "sharding_rules.mlp[0]: expected a string, got a list"),
        ("drafter.name=dflsh", "drafter.name: unknown name 'dflsh'; did you mean 'dflash'?"),
        ("drafter.name=null",
         f"drafter.name: unknown name 'null'; expected one of {', '.join(sorted(DRAFTERS))}"),
        ("drafter.name.x=1", "drafter.name: expected a string, got a mapping"),
        ("drafter.checkpoint=x", "drafter.checkpoint: unknown key; "
         "did you mean 'target.checkpoint'?"),
        ("target.name=qwen9", "target.name: unknown name 'qwen9'; did you mean 'qwen3'?"),
        ("target.architecture=big", "target.architecture: expected a mapping or null, got 'big'"),
        ("base=[x.yml]", "base: is only allowed in a file"),
        ("decode.seed", "'decode.seed': expected key=value"),
        ("=3", "'=3': expected key=value"),
        ("decode..seed=3", "'decode..seed=3': expected key=value"),
        (".=3", "'.=3': expected key=value"),
    ],
)  # fmt: skip
def test_a_bad_override_is_one_line(write, override, expected):
    write("c.yml", MINIMAL)
    if "block_size" in override or "vocab_size" in override:
        write("c.yml", MINIMAL + "drafter: {name: dflash, checkpoint: d}\n")
    assert problems("c.yml", override) == [f"command line: {expected}"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("prompts: {file: 123}", "prompts.file: expected a string or null, got 123"),
        ("prompts: {text: Hello}", "prompts.text: expected a list of strings, got 'Hello'"),
        ("prompts: {text: [a, 12]}", "prompts.text[1]: expected a string, got 12"),
        ("decode: {stop_ids: 7}", "decode.stop_ids: expected a list of integers >= 0, got 7"),
        ("decode:", "decode: expected a mapping, got null"),
        ("decode: {seed: off}", f"{SEED}, got 'off'"),
        ("decode: {ignore_eos: off}", "decode.ignore_eos: expected true or false, got 'off'"),
        ("drafter: {name: }", "drafter.name: expected a string, got null"),
        ("decode: {base: [x]}", "decode.base: unknown key; did you mean 'decode.baseline'?"),
        ("1: 2", "1: unknown key; expected one of target, drafter, decode, prompts, mesh, "
         "sharding_rules, dtype"),
        ("decode.seed: 2", "decode.seed: unknown key; dotted keys are for the command line; "
         "nest mappings here"),
        ("base: x.yml", "base: expected a list of files, such as [models/x.yml]"),
        ("base: [1]", "base: expected a list of files, such as [models/x.yml]"),
        ("base: []", "base: expected a list of files, such as [models/x.yml]"),
        ("base: [gone.yml]", "base: no such file 'gone.yml', neither beside this file nor among "
         "the shipped configs"),
    ],
)  # fmt: skip
def test_a_bad_line_in_a_file_is_one_line(write, text, expected):
    write("c.yml", f"{MINIMAL}{text}\n")
    assert problems("c.yml") == [f"c.yml:2: {expected}"]


def test_missing_keys_are_named_with_what_they_expect(write):
    text = """\
    target: {name: qwen3, checkpoint: random,
      architecture: {vocab_size: 64, hidden_size: 32, num_hidden_layers: 2,
        num_attention_heads: 4, max_position_embeddings: 128,
        rope_scaling: {factor: 0.5}}}
    """
    prefix = "target.architecture"
    assert problems(write("c.yml", text)) == [
        f"c.yml:2: {prefix}.intermediate_size: required: an integer >= 1",
        f"c.yml:2: {prefix}.num_key_value_heads: required: an integer >= 1",
        f"c.yml:2: {prefix}.head_dim: required: an integer >= 2",
        f"c.yml:4: {prefix}.rope_scaling.factor: expected a number >= 1, got 0.5",
    ]


def test_all_problems_are_reported_at_once(write):
    write("base.yml", "decode: {top_p: 7}\n")
    text = """\
    base: [base.yml]
    decode:
      seed: 1
      seed: 2
      sync_evry: 3
    drafter: {name: dflash}
    """
    write("c.yml", text)
    assert problems("c.yml", "nonsense", "mesh.data=0", "decode.page_size=100") == [
        "c.yml:4: duplicate key 'seed', first on line 3",
        "command line: 'nonsense': expected key=value",
        "c.yml:5: decode.sync_evry: unknown key; did you mean 'decode.sync_every'?",
        "base.yml:1: decode.top_p: expected a number in [0, 1], got 7",
        "command line: mesh.data: expected an integer >= 1, got 0",
        "c.yml: target.checkpoint: required: a directory, hf:org/name, or random",
        "c.yml:6: drafter.checkpoint: required: a directory, hf:org/name, or random",
        "command line: decode.page_size: expected a power of two, got 100",
    ]


def test_a_check_is_silent_about_values_already_reported(write):
    write("c.yml", MINIMAL)
    found = problems("c.yml", "decode.max_new_tokens=x", "decode.max_length=8")
    assert found == [
        "command line: decode.max_new_tokens: expected an integer in [1, 16777216], got 'x'"
    ]


def test_an_unreadable_base_hides_nothing_and_invents_nothing(write):
    """An unreadable base may hold missing keys or the drafter's name, so these are not reported."""
    write("broken.yml", "drafter: {name: dflash\n")
    write("c.yml", "base: [broken.yml]\ndrafter: {block_size: 4}\ndecode: {sead: 1}\n")
    assert problems("c.yml") == [
        "broken.yml:2: not valid YAML: expected ',' or '}', but got '<stream end>'",
        "c.yml:3: decode.sead: unknown key; did you mean 'decode.seed'?",
    ]


def test_a_cycle_of_bases_is_an_error(write):
    write("a.yml", "base: [sub/b.yml]\n")
    write("sub/b.yml", "base: [../a.yml]\n")
    assert problems("a.yml") == ["sub/b.yml:1: base: cycle a.yml -> sub/b.yml -> a.yml"]
    write("self.yml", "\nbase: [self.yml]\n")
    assert problems("self.yml") == ["self.yml:2: base: cycle self.yml -> self.yml"]


def test_files_that_are_no_config(write, tmp_path):
    write("list.yml", "[1, 2]\n")
    (tmp_path / "folder").mkdir()
    assert problems("list.yml") == ["list.yml: expected a mapping of keys to values, got a list"]
    assert problems("folder") == [
        "folder: is a directory, expected a config, such as configs/tiny_dflash.yml"
    ]
    assert problems("gone.yml", "x") == [
        "gone.yml: no such file",
        "command line: 'x': expected key=value",
    ]


def test_a_config_names_configs_only(write, tmp_path):
    """The messages about another file, such as a key, would show what is in it."""
    write("id_rsa", "secret\n")
    (tmp_path / "linked.yml").symlink_to(tmp_path / "id_rsa")
    for name in ("id_rsa", "linked.yml"):
        write("c.yml", f"base: [{name}]\n" + MINIMAL)
        expected = f"c.yml:1: base: '{name}': expected a file of type .yml or .yaml"
        assert problems("c.yml") == [expected]
    write("b.yml", MINIMAL + "strategies: {a: id_rsa}\n")
    problem, *_ = problems("b.yml", schema=BenchmarkRun)
    assert problem.endswith("strategies.a: id_rsa: expected a file of type .yml or .yaml")


def test_a_pipe_is_no_config(write, tmp_path):
    """Reading one would wait for somebody to write to it."""
    os.mkfifo(tmp_path / "pipe.yml")
    assert problems("pipe.yml") == ["pipe.yml: cannot be read: not a regular file"]
    write("c.yml", "base: [pipe.yml]\n" + MINIMAL)
    assert problems("c.yml") == ["pipe.yml: cannot be read: not a regular file"]
