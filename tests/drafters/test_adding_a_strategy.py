"""The strategy that docs/adding_a_strategy.md adds, from the page itself, held to the contract."""

import importlib
import re
import sys
import textwrap

import pytest
from support import TESTS
from support.models import ARCHITECTURE, make_sharding

from dflash import errors, registry
from dflash.config import loader

PAGE = TESTS.parent / "docs" / "adding_a_strategy.md"
SCHEMA_IMPORTS = """
import dataclasses
from dflash.config.schema import DrafterConfig, option
"""


@pytest.fixture
def contract(monkeypatch, tmp_path):
    """The contract tests, with the page's strategy in the registry."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    strategy, config, line = (textwrap.dedent(block) for block in blocks)
    (tmp_path / "page_strategy.py").write_text(strategy)
    (tmp_path / "page_schema.py").write_text(SCHEMA_IMPORTS + config)
    monkeypatch.syspath_prepend(tmp_path)
    line = line.replace("dflash.drafters.repeat:", "page_strategy:")
    line = line.replace("dflash.config.schema:", "page_schema:")
    for name, entry in eval(f"{{{line}}}", {"Entry": registry.Entry}).items():
        monkeypatch.setitem(registry.DRAFTERS, name, entry)
    yield importlib.import_module("contract.test_drafter_contract")
    for name in ("page_strategy", "page_schema"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("contract")
def test_its_keys_are_checked(tmp_path):
    path = tmp_path / "run.yml"
    path.write_text("target: {checkpoint: x}\ndrafter: {name: repeat}\n")
    assert loader.load(path).drafter.num_draft_tokens == 4
    with pytest.raises(errors.ConfigError) as caught:
        loader.load(path, ["drafter.num_draft_tokens=0", "drafter.lenght=1"])
    assert [problem.partition(": ")[2] for problem in caught.value.problems] == [
        "drafter.lenght: unknown key; expected one of name, num_draft_tokens",
        "drafter.num_draft_tokens: expected an integer in [1, 64], got 0",
    ]


def test_it_passes_the_contract(contract):
    form = contract.Form("repeat")
    case = contract.fitting(form, contract.RAGGED)
    contract.test_output_is_that_of_plain_decoding(form, case)
    contract.test_proposals_are_well_formed(form, False)
    contract.test_greedy_rejection_is_plain_greedy_decoding(form)
    model = contract.ragged_engine(form).drafter
    assert type(model).__name__ == "Repeat"
    assert model.num_draft_tokens == 4


def test_it_is_built_as_the_page_says(contract):
    kind = registry.load(registry.DRAFTERS["repeat"].implementation)
    config = registry.load(registry.DRAFTERS["repeat"].schema)(num_draft_tokens=2)
    model = kind.create(config, None, ARCHITECTURE, dtype="float32", sharding=make_sharding())
    assert model.block_size == 3
