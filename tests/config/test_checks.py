import dataclasses

import pytest
from support import failure

from dflash import errors
from dflash.config import loader, schema
from dflash.config.train_schema import DataConfig

CONFIG = """
target: {name: qwen3, checkpoint: random, architecture: {
  vocab_size: 64, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 6,
  num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8, max_position_embeddings: 256}}
drafter: {name: dflash, checkpoint: random}
decode: {max_new_tokens: 8}
"""


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yml").write_text(CONFIG)
    return lambda *overrides: loader.load("c.yml", overrides)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("target.checkpoint=null",
         "target.checkpoint: required: a directory, hf:org/name, or random"),
        ("target.name=null", "target.name: required by target.checkpoint=random"),
        ("target.architecture=null", "target.architecture: required by target.checkpoint=random"),
        ("target.architecture.num_key_value_heads=3", "target.architecture.num_attention_heads: "
         "4 does not divide into num_key_value_heads=3 groups"),
        ("target.architecture.head_dim=7",
         "target.architecture.head_dim: expected an even number (rotary halves), got 7"),
        ("target.architecture.eos_token_id=[1,64]", "target.architecture.eos_token_id: "
         "64 is not in the target's vocabulary of 64"),
        ("target.architecture.rope_scaling.low_freq_factor=4",
         "target.architecture.rope_scaling.low_freq_factor: "
         "4.0 is not below high_freq_factor=4.0"),
        ("target.rope_scaling.rope_type=yarn target.rope_scaling.beta_slow=40",
         "target.rope_scaling.beta_slow: 40.0 is not below beta_fast=32.0"),
        ("drafter.architecture.block_size=4 drafter.block_size=5",
         "drafter.block_size: 5 exceeds drafter.architecture.block_size=4"),
        ("drafter.devices=2",
         "drafter.devices: needs drafter.overlap=ssd; leave it out"),
        ("drafter.overlap=ssd drafter.block_size=auto", "drafter.block_size: auto is not "
         "supported with drafter.overlap=ssd; give a number, or leave it out"),
        ("drafter.overlap=ssd drafter.window=auto", "drafter.window: auto is not "
         "supported with drafter.overlap=ssd; give a number, or leave it out"),
        ("drafter.overlap=ssd drafter.tree.budget=8", "drafter.tree: drafter.overlap=ssd drafts "
         "chains; leave one of the two out"),
        ("drafter.overlap=ssd decode.verify=rejection", "decode.verify: rejection is not "
         "supported with drafter.overlap=ssd; use coupled"),
        ("drafter.overlap=ssd decode.exact=true",
         "drafter.overlap: verifies fewer rows; leave it out"),
        ("drafter.overlap=ssd decode.lookup=true", "decode.lookup: is not supported with "
         "drafter.overlap=ssd; leave one of the two out"),
        ("decode.lookup=true drafter.tree.budget=8", "decode.lookup: "
         "copies replace chains, not trees; leave one of the two out"),
        ("drafter.longest_context=99", "drafter.longest_context: "
         "needs drafter.block_size=auto, which can decode plainly"),
        ("drafter.divide_rows=false", "drafter.divide_rows: "
         "false has a meaning with drafter.block_size=auto only; leave it out"),
        ("drafter.block_size=aut", "drafter.block_size: "
         "expected an integer in [2, 1024] or auto or null, got 'aut'; did you mean 'auto'?"),
        ("drafter.name=autoregressive drafter.checkpoint=d drafter.family=qwen33",
         "drafter.family: unknown name 'qwen33'; did you mean 'qwen3'?"),
        ("drafter.architecture.mask_token_id=64", "drafter.architecture.mask_token_id: "
         "64 is not in the target's vocabulary of 64"),
        ("drafter.architecture.target_layer_ids=[1,6]", "drafter.architecture.target_layer_ids: "
         "no layer 6 in a target of 6 layers (0 to 5)"),
        ("drafter.architecture.target_layer_ids=[1,1]", "drafter.architecture.target_layer_ids: "
         "expected distinct layers, got [1, 1]"),
        ("drafter.architecture.target_layer_ids=[]", "drafter.architecture.target_layer_ids: "
         "expected at least one layer, got none"),
        ("decode.stop_ids=[64]", "decode.stop_ids: 64 is not in the target's vocabulary of 64"),
        ("decode.max_length=8", "decode.max_length: "
         "8 leaves no room for a prompt beside decode.max_new_tokens=8"),
        ("decode.min_new_tokens=9",
         "decode.min_new_tokens: 9 exceeds decode.max_new_tokens=8"),
        ("decode.page_size=12", "decode.page_size: expected a power of two, got 12"),
        ("prompts.text=a prompts.file=b",
         "prompts.file: excludes prompts.text; give one of the two"),
        ("prompts.file=a prompts.dataset=math",
         "prompts.dataset: excludes prompts.file; give one of the two"),
        ("prompts.dataset=mth", "prompts.dataset: unknown data set 'mth'; did you mean 'math'?"),
        ("prompts.dataset=jsonl",
         "prompts.dataset: jsonl has no prompts; set prompts.file to the file"),
        ("sharding_rules.vocb=[]", "sharding_rules.vocb: unknown axis 'vocb'; "
         "did you mean 'vocab'?"),
        ("sharding_rules.vocab=[tensr]", "sharding_rules.vocab: unknown mesh axis 'tensr'; "
         "did you mean 'tensor'?"),
        ("sharding_rules.vocab=[fsdp,fsdp]",
         "sharding_rules.vocab: names mesh axis 'fsdp' twice"),
        ("decode.batch_size=3 mesh.data=2", "decode.batch_size: "
         "3 does not divide over mesh.data × mesh.fsdp = 2 devices"),
    ],
)  # fmt: skip
def test_a_misfit_is_one_line(load, overrides, expected):
    assert failure(load, *overrides.split(), kind=errors.ConfigError) == (
        f"command line: {expected}"
    )


@pytest.mark.parametrize(
    "overrides",
    [
        "",
        "drafter.name=none",
        "drafter.block_size=16",
        "drafter.block_size=auto",
        "drafter.window=auto",
        "drafter.checkpoint=somewhere drafter.block_size=32",
        "drafter.architecture.target_layer_ids=[0,5]",
        "drafter.architecture.mask_token_id=63",
        "decode.verify=rejection decode.temperature=0.8",
        "decode.max_length=9",
        "decode.batch_size=3 mesh.data=2 sharding_rules.batch=[]",
        "decode.batch_size=3 mesh.tensor=2",
        "target.checkpoint=somewhere target.architecture=null target.name=null",
        "target.checkpoint=somewhere target.architecture=null decode.stop_ids=[64]",
        "prompts.dataset=math prompts.limit=3",
    ],
)
def test_what_fits_is_accepted(load, overrides):
    load(*overrides.split())


@dataclasses.dataclass(frozen=True)
class Learning:
    """A run that has data."""

    data: DataConfig = dataclasses.field(default_factory=DataConfig)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("", "data.mixture: required: a share for each data set, such as {math: 1.0}; or set "
         "data.files"),
        ("data.mixture={math:0}",
         "data.mixture: every share is 0; set one above 0, or set data.files"),
        ("data.mixture={jsonl:0} data.files=a.jsonl", "data.mixture: every share is 0, also that "
         "of jsonl, which reads data.files; set it to 1"),
        ("data.mixture={mth:1}",
         "data.mixture.mth: unknown data set 'mth'; did you mean 'math'?"),
        ("data.mixture={math:-1}",
         "data.mixture.math: expected a number >= 0, got -1"),
        ("data.mixture={math:1} data.files=a.jsonl", "data.files: is read by the data set jsonl, "
         "for which data.mixture has no share; set data.mixture.jsonl=1, or the other shares to 0 "
         "to train on the files alone"),
        ("data.mixture={jsonl:1}",
         "data.files: required by the data set jsonl of data.mixture"),
    ],
)  # fmt: skip
def test_data_that_cannot_be(tmp_path, overrides, expected):
    path = tmp_path / "c.yml"
    path.write_text("data: {}\n")
    overrides = [override.replace(":", ": ") for override in overrides.split()]
    with pytest.raises(errors.ConfigError) as caught:
        loader.load(path, overrides, Learning)
    assert caught.value.problems[0].endswith(f": {expected}")


@pytest.mark.parametrize(
    ("overrides", "shares"),
    [
        ("data.files=a.jsonl", {"jsonl": 1.0}),
        ("data.files=a.jsonl data.mixture.math=0", {"jsonl": 1.0}),
        ("data.files=[a.jsonl] data.mixture.jsonl=2 data.mixture.math=1",
         {"jsonl": 2.0, "math": 1.0}),
        ("data.mixture.math=1 data.mixture.chat=0", {"math": 1.0}),
    ],
)  # fmt: skip
def test_shares_of_data(tmp_path, overrides, shares):
    path = tmp_path / "c.yml"
    path.write_text("data: {}\n")
    assert loader.load(path, overrides.split(), Learning).data.shares == shares


def test_files_with_one_name_are_numbered():
    named = schema.named_tasks(["math", "a/q.jsonl", "b/q.jsonl", "q 1.jsonl"])
    assert named == {"math": "math", "q": "a/q.jsonl", "q-2": "b/q.jsonl", "q_1": "q 1.jsonl"}
