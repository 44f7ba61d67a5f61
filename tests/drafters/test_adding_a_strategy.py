"""The strategy that docs/adding_a_strategy.md adds, from the page itself, held to the contract."""

import importlib
import os
import re
import shlex
import subprocess
import sys
import textwrap

import pytest
from support import TESTS
from support.distributions import install
from support.models import ARCHITECTURE, make_sharding

from dflash import errors
from dflash.config import loader, registry

PAGE = TESTS.parent / "docs" / "adding_a_strategy.md"


@pytest.fixture
def contract(monkeypatch, tmp_path):
    """The contract tests, with the page's strategy in a package as the page describes it."""
    page = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    strategy, config, line, registered = (textwrap.dedent(block) for block in blocks)
    (inside,) = eval(f"{{{line}}}", {"Entry": registry.Entry})
    points = re.search(r"```toml\n\[project.entry-points.\"(.*?)\"\]\n(.*?)```", page, re.DOTALL)
    group, point = points[1], points[2].replace('"', "")
    assert point.startswith(f"{inside} = ")
    modules = {"drafter": strategy, "keys": config, "registered": registered}
    install(
        monkeypatch,
        tmp_path / "installed",
        f"[{group}]\n{point}".replace("my_package.", "page_"),
        {f"page_{name}": text.replace("my_package.", "page_") for name, text in modules.items()},
    )
    return importlib.import_module("contract.test_strategy_contract")


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


def test_it_meets_the_contract_of_strategies(contract):
    form = contract.Form("repeat")
    contract.test_output_is_that_of_plain_decoding(form, 0.8, 0)
    contract.test_live_state_drafts_as_a_freshly_prefilled_one(form)
    contract.test_probabilities_are_those_that_drafts_were_drawn_from(form)
    model = contract.loop(form).drafter
    assert type(model).__name__ == "Repeat"
    assert model.num_draft_tokens == 4


def test_it_passes_the_contract_as_the_page_runs_it(contract, tmp_path):
    (command,) = re.findall(r"^    python (-m pytest .*)$", PAGE.read_text("utf-8"), re.MULTILINE)
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, *shlex.split(command), "-q", "-p", "no:cacheprovider"], cwd=TESTS.parent,
        env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 10


def test_it_is_built_as_the_page_says(contract):
    kind = registry.load(registry.DRAFTERS["repeat"].implementation)
    config = registry.load(registry.DRAFTERS["repeat"].schema)(num_draft_tokens=2)
    model = kind.create(config, None, ARCHITECTURE, dtype="float32", sharding=make_sharding())
    assert model.block_size == 3
