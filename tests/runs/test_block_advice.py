"""Tests of the advice on block sizes: what shorter blocks would have committed."""

import pytest

from dflash.config.schema import DrafterConfig
from dflash.drafters.base_config import MarginalTree
from dflash.drafters.dflash_config import DFlashConfig
from dflash.drafters.eagle3_config import Eagle3Config
from dflash.runs.block_advice import BlockAcceptance, longer_than_needed, slower_than_plain

SHORT = BlockAcceptance({1: 50, 2: 30, 3: 20}, 16)  # τ 1.7, of blocks of 16 rows


def test_shorter_blocks_cut_acceptance_lengths():
    assert SHORT.tau(16) == SHORT.tau(3) == pytest.approx(1.7)
    assert SHORT.tau(2) == pytest.approx(1.5)
    assert SHORT.tau(1) == 1
    assert SHORT.enough() == 3


def test_the_block_size_that_would_pay_is_named():
    """At 0.34 ×, a cycle of 16 rows costs 5 plain tokens, and one of 3 rows 1.53."""
    (line,) = slower_than_plain(DFlashConfig(), SHORT, 0.34)
    assert "drafting is slower than plain decoding (0.34 ×)" in line
    assert "a cycle of 16 rows takes as long as 5.0 plain tokens and commits 1.70" in line
    assert "drafter.block_size=2 (or auto, which measures) would run at about 1.18 ×" in line
    (line,) = slower_than_plain(Eagle3Config(), SHORT, 0.34)
    assert "drafter.num_draft_tokens=1 would run at about 1.18 ×" in line


@pytest.mark.parametrize(
    "drafter",
    [DrafterConfig(), DFlashConfig(block_size="auto"), DFlashConfig(tree=MarginalTree(budget=9))],
)
def test_strategies_without_a_fixed_block_are_advised_to_stop(drafter):
    (line,) = slower_than_plain(drafter, SHORT, 0.34)
    assert line.endswith("no shorter block would pay, so use drafter.name=none")
    assert longer_than_needed(drafter, SHORT) == []


def test_blocks_that_are_longer_than_needed():
    (line,) = longer_than_needed(DFlashConfig(), SHORT)
    assert line.startswith("warning: cycles of 16 rows commit 1.70 tokens, and blocks of 3 would")
    assert "drafter.block_size=3" in line
    assert longer_than_needed(DFlashConfig(), BlockAcceptance({1: 50, 2: 30, 3: 20}, 4)) == []
    assert longer_than_needed(DFlashConfig(), BlockAcceptance({4: 10, 16: 30}, 16)) == []
