from collections import Counter

import pytest
from support.dflash_cases import CAUSAL, FULL, make_shape
from support.models import make_architecture

from dflash.config.schema import PromptsConfig
from dflash.drafters.dflash_config import LayerView
from dflash.measure.pair import alternatives, report
from dflash.measure.pair.alternatives import Alternative
from dflash.measure.pair.diagnosis import Acceptance, Reading
from dflash.text.tokenizer import ByteTokenizer


class Named(ByteTokenizer):
    """Bytes with two special tokens, and a template that may ask for reasoning."""

    has_chat_template = True

    @property
    def special_spellings(self):
        return {3: "<|pad|>", 7: "<|mask|>", 9: "<|end|>", 60: "<|mask_2|>"}

    def __init__(self, thinks: bool, usual: bool | None = None):
        self.thinks, self.usual = thinks, usual

    def render_chat(self, messages, *, add_generation_prompt=True, **variables):
        thinking = variables.get("enable_thinking", self.usual)
        return "<think>" if self.thinks and thinking is not False else ""


def readings(shape, target=None, tokenizer=None, window=None):
    found = alternatives.of_drafter(
        shape, target or make_architecture(), tokenizer or ByteTokenizer(), window
    )
    return {(one.field, one.change): one.shape for one in found}


def test_each_reading_changes_one_field():
    shape = make_shape(FULL, LayerView(4, causal=True), target_layer_ids=(0, 1))
    target = make_architecture(num_hidden_layers=3, rope_theta=5e5)
    found = readings(shape, target, Named(thinks=False))
    views = {change: found["is_causal", change].views for field, change in found
             if field == "is_causal"}  # fmt: skip
    assert views == {
        "true (every layer)": (CAUSAL, LayerView(4, causal=True)),
        "false (every layer)": (FULL, LayerView(4)),
    }
    assert found["sliding_window_non_causal", "true"].views == (FULL, LayerView(4))
    assert found["layer_types", "full_attention (every layer)"].views == (FULL, CAUSAL)
    assert found["target_layer_ids", "[1, 2]"].target_layer_ids == (1, 2)
    assert found["rope_theta", "500000 (the target's)"].decoder.rope_theta == 5e5
    masks = [one.mask_token_id for (field, _), one in found.items() if field == "mask_token_id"]
    assert masks == [3, 7]
    for one in found.values():
        assert sum(value != getattr(one, name) for name, value in vars(shape).items()) == 1


def test_a_reading_that_is_the_files_own_is_left_out():
    found = readings(make_shape(CAUSAL, target_layer_ids=(1,)))
    assert {field for field, _ in found} == {"is_causal", "target_layer_ids"}
    assert [change for field, change in found if field == "is_causal"] == ["false (every layer)"]


def test_a_window_that_is_stated_but_not_used_is_tried():
    found = readings(make_shape(FULL, CAUSAL, target_layer_ids=(1,)), window=9)
    change = "sliding_attention (every layer, 9)"
    assert found["layer_types", change].views == (LayerView(9), LayerView(9, causal=True))
    for unused in (None, 0, "9"):
        views = readings(make_shape(FULL, target_layer_ids=(1,)), window=unused)
        assert ("layer_types", change) not in views


@pytest.mark.parametrize(
    ("prompts", "thinks", "expected"),
    [
        ({"text": ("a",), "chat": None}, False, []),
        ({"text": ("a",), "chat": False}, False, ["prompts.chat"]),
        ({"text": ("a",), "chat": True}, True, ["prompts.thinking"]),
        ({"dataset": "math", "thinking": True}, True, ["prompts.thinking"]),
        ({"dataset": "math", "thinking": False}, True, ["prompts.thinking"]),
        ({"dataset": "math"}, False, []),
    ],
)
def test_readings_of_prompts(prompts, thinks, expected):
    config = PromptsConfig(**prompts)
    found = list(alternatives.of_prompts(config, Named(thinks, config.thinking)))
    assert [one.field for one in found] == expected
    for one in found:
        (name,) = one.prompts
        assert getattr(config, name) != one.prompts[name]


def test_windows_are_tried_that_hide_half_of_a_prompt():
    def tried(*views, longest):
        found = alternatives.of_drafter(
            make_shape(*views), make_architecture(), ByteTokenizer(), longest_prompt=longest
        )
        return {one.change: one.shape.views for one in found if one.field == "drafter.window"}

    assert not tried(FULL, longest=127)
    assert tried(FULL, FULL, longest=600) == {
        "64": (LayerView(64), LayerView(64)),
        "256": (LayerView(256), LayerView(256)),
    }
    assert list(tried(LayerView(64), longest=10_000)) == [], "the drafter sees no more"


def test_a_window_that_accepts_more_belongs_to_the_config_of_the_run():
    found = Reading(
        Alternative("drafter.window", "64", make_shape(FULL)), Acceptance(Counter({2: 10}))
    )
    line = report.verdict(None, Acceptance(Counter({1: 10})), found)
    assert line == (
        "suspicious: drafter.window. With 64, τ is 2.00 instead of 1.00; set it in the run's config"
    )
