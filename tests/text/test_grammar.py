import json
import sys

import numpy as np
import pytest
from support.grammars import replace_check
from support.trained_tokenizers import failure

from dflash import errors
from dflash.text import grammar, grammar_compiler
from dflash.text.grammar import Grammar, Vocabulary
from dflash.text.token_bytes import TokenBytes

pytest.importorskip("llguidance", reason="pip install 'dflash-jax[grammar]'")

TEXTS = [*'{}":,[]ab01 -', '{"', '":', "ab", "ba", "01", None, None]
A, B, AB, BA = (TEXTS.index(text) for text in ("a", "b", "ab", "ba"))
END, OTHER = len(TEXTS) - 1, len(TEXTS) - 2


def make_vocabulary(drops_space: bool = False) -> Vocabulary:
    tokens = tuple(text and text.encode() for text in TEXTS)
    return Vocabulary(TokenBytes(tokens, drops_space))


VOCABULARY = make_vocabulary()


def filled(matcher, tokens=(), parents=None, ends=(END,), words=2, **options) -> list[set]:
    """Returns the texts, or ids of tokens without text, that may follow each row."""
    masks = np.full((len(tokens) + 1, words), -1, np.int32)
    matcher.fill(masks, tokens, parents, ends=ends, **options)
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    return [names(np.flatnonzero(row)) if not row.all() else {"?"} for row in bits]


def names(ids) -> set:
    return {(TEXTS[i] or int(i)) if i < len(TEXTS) else int(i) for i in ids}


def test_rows_of_a_chain():
    matcher = grammar.of_source("regex", "(ab)+", VOCABULARY).matcher()
    begin, middle, ends = {"a", "ab"}, {"b", "ba"}, {"a", "ab", END}
    assert filled(matcher, [A, B, AB]) == [begin, middle, ends, ends]
    # Past a draft that the grammar does not allow, rows do not matter.
    assert filled(matcher, [A, A, AB]) == [begin, middle, {"?"}, {"?"}]
    assert filled(matcher, [END, A]) == [begin, {"?"}, {"?"}]
    assert filled(matcher) == [begin], "filling leaves the matcher where it was"
    matcher.advance([AB, A])
    assert filled(matcher, [BA]) == [middle, middle]
    assert not matcher.may_end
    matcher.advance([B])
    assert matcher.may_end


def test_objects_of_many_optional_properties():
    """Four states per property: 900 exceed the limit of grammars, but not that of schemas."""
    names = ["".join("ab"[i >> k & 1] for k in range(10)) for i in range(900)]
    schema = {"properties": {name: {"const": 0} for name in names}, "type": "object"}
    schema["additionalProperties"] = False
    matcher = grammar.of_source("json_schema", schema, VOCABULARY).matcher(timed=False)
    first, second = names[3], names[800]
    text = f'{{"{first}":0,"{second}":0}}'
    matcher.advance([TEXTS.index(character) for character in text])
    assert matcher.may_end


def test_rows_of_a_tree():
    matcher = grammar.of_source("regex", "a(b|0)?1|b", VOCABULARY).matcher()
    tokens = [A, B, B, TEXTS.index("0"), TEXTS.index("1"), TEXTS.index("01")]
    parents = [0, 0, 1, 1, 4, 1]
    rows = filled(matcher, tokens, parents)
    assert rows == [
        {"a", "b", "ab"}, {"b", "0", "1", "01"}, {END}, {"1"}, {"1"}, {END}, {END}
    ]  # fmt: skip
    assert filled(matcher)[0] == rows[0]


def test_ends():
    matcher = grammar.of_source("regex", "a*", VOCABULARY).matcher()
    assert filled(matcher) == [{"a", END}]
    assert filled(matcher, ends=(END, OTHER)) == [{"a", END, OTHER}]
    # A token of text that ends the output is no text.
    assert filled(matcher, ends=(A,)) == [{"a"}]
    matcher = grammar.of_source("regex", "b(a|b)*a", VOCABULARY).matcher()
    assert filled(matcher, ends=(A,)) == [{"b", "ba"}]
    assert filled(matcher, [BA], ends=(A,))[1] == {"a", "b", "ab", "ba"}
    # Not in the tokenizer, but in the target's vocabulary.
    assert filled(grammar.of_source("regex", "a*", VOCABULARY).matcher(), ends=(40,)) == [{"a", 40}]


def test_a_least_length_gives_way_to_the_grammar():
    matcher = grammar.of_source("regex", "a{0,2}", VOCABULARY).matcher()
    assert filled(matcher, [A, A], first_end=9) == [{"a"}, {"a"}, {END}]
    assert filled(matcher, [A, A], first_end=1) == [{"a"}, {"a", END}, {END}]


def test_special_tokens_are_no_text():
    matcher = grammar.of_source("regex", "(?s:.*)", VOCABULARY).matcher()
    (row,) = filled(matcher)
    assert row == {text for text in TEXTS if text} | {END}


def test_an_output_does_not_begin_with_a_space_that_nobody_sees():
    spaced = make_vocabulary(drops_space=True)
    matcher = grammar.of_source("regex", " *a", spaced).matcher()
    assert filled(matcher, [A]) == [{"a"}, {END}]
    matcher = grammar.of_source("regex", "a *b", spaced).matcher()
    assert filled(matcher, [A])[1] == {" ", "b"}
    assert "no token of the target can begin" in failure(grammar.of_source, "regex", " a", spaced)


def test_where_nothing_fits_the_output_ends_unfinished():
    matcher = grammar.of_source("regex", "ax", VOCABULARY).matcher()
    assert filled(matcher, [A]) == [{"a"}, {END}]
    matcher.advance([A])
    assert not matcher.may_end


def test_a_draft_that_is_too_much_does_no_harm():
    """A draft that exceeds the limits of the library need not become output."""
    hard = "b(((a{1,99}){1,99}){1,99}){1,99}|a"
    matcher = Grammar("regex", hard, VOCABULARY).matcher()
    matcher.fill(np.zeros((65, 1), np.int32), [B] + [A] * 63, ends=(END,))
    assert filled(matcher, [A]) == [{"a", "b", "ba"}, {END}]


def test_json():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    schema["additionalProperties"] = False
    for given in (schema, json.dumps(schema)):
        matcher = grammar.of_source("json_schema", given, VOCABULARY).matcher()
        matcher.advance([TEXTS.index(one) for one in ('{"', "a", '":', "-")])
        assert filled(matcher) == [{"0", "1"}]
    matcher.advance([TEXTS.index(one) for one in ("1", " ")])
    assert filled(matcher) == [{"}"}], "one space is enough"
    matcher = grammar.of_source("json_object", "", VOCABULARY).matcher()
    assert filled(matcher) == [{"{", '{"'}]
    matcher.advance([TEXTS.index("{"), TEXTS.index("}")])
    assert filled(matcher) == [{END}]
    matcher = grammar.of_source("lark", 'start: "a" start "b" | "ab"', VOCABULARY).matcher()
    matcher.advance([A, AB])
    assert filled(matcher, [B]) == [{"b"}, {END}]


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        ("regex", "(a", "regex: "),
        ("regex", "a(?=b)", "look-around, including look-ahead and look-behind, is not"),
        ("regex", "\ud800", "regex: contains an unpaired surrogate"),
        ("regex", "a" * 70_000, "regex: 70000 bytes, expected at most 65536"),
        ("json_schema", "{", "json_schema: EOF while parsing"),
        ("json_schema", "[]", "json_schema: "),
        ("json_schema", {"type": "text"}, "json_schema: Invalid type: text"),
        ("json_schema", {"$ref": "#/x"}, "json_schema: Pointer '/x' does not exist"),
        ("json_schema", {"$ref": "http://x.org/y"}, "json_schema: Resource"),
        ("json_schema", {"enum": []}, "json_schema: Unsatisfiable schema"),
        ("json_schema", {"uniqueItems": True, "type": "array"}, 'keys: ["uniqueItems"]'),
        ("json_schema", {"uniqueItems": True, "type": "array", "x-guidance": {"lenient": True}},
         'keys: ["uniqueItems"]'),
        ("json_schema", {"a": {1, 2}}, "json_schema: Object of type set is not JSON"),
        ("lark", "start: nothing", "lark: "),
        ("lark", "", "lark: "),
        ("regex", "x", "no token of the target can begin what it matches"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_in_one_line(kind, source, message):
    assert message in failure(grammar.of_source, kind, source, VOCABULARY)


def test_deep_schemas_are_refused():
    schema: dict = {}
    for _ in range(100_000):
        schema = {"items": schema}
    assert "json_schema: " in failure(grammar.of_source, "json_schema", schema, VOCABULARY)
    text = '{"items":' * 2_000 + "{}" + "}" * 2_000
    assert "recursion limit" in failure(grammar.of_source, "json_schema", text, VOCABULARY)


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("json_schema", {"type": "integer", "multipleOf": 999_983}),  # minutes
        ("regex", "a{100000000}"),
    ],
    ids=["time", "automaton"],
)
def test_what_takes_too_long_is_refused(kind, source):
    assert failure(grammar.of_source, kind, source, VOCABULARY)


def test_the_library_may_be_absent(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(errors.InputError, match=r"pip install 'dflash-jax\[grammar\]'"):
        grammar.of_source("regex", "a", VOCABULARY)


def test_compiling_may_take_processor_time_not_time_by_the_clock(monkeypatch, tmp_path):
    """A small grammar takes long in wall-clock time on a busy machine."""
    replace_check(monkeypatch, tmp_path, "sleeps", "time.sleep(1.5)", "grammar_check.main()")
    assert grammar.of_source("regex", "1{2,7}", VOCABULARY).source == "1{2,7}"
    spin = "grammar_check.limit_time(1)", "while True: pass"
    replace_check(monkeypatch, tmp_path, "spins", *spin)
    with pytest.raises(errors.InputError, match="regex: takes more than 1 s to compile"):
        grammar.of_source("regex", "1{2,9}", VOCABULARY)


def test_memory_to_compile_is_limited(monkeypatch, tmp_path):
    monkeypatch.setattr(grammar_compiler, "_COMPILE_BYTES", 2**29)
    hungry = "grammar_check.limit('RLIMIT_AS', 2**29)", "bytearray(2**30)"
    caught = "except MemoryError: os._exit(grammar_check.OUT_OF_MEMORY)"
    replace_check(
        monkeypatch, tmp_path, "hungry", "try:", *(f"  {line}" for line in hungry), caught
    )
    with pytest.raises(errors.InputError, match="regex: takes more than 512 MiB to compile"):
        grammar.of_source("regex", "1{3,9}", VOCABULARY)


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "os._exit(1)", "raise OSError"])
def test_an_interrupted_check_is_not_the_grammars_fault(end, monkeypatch, tmp_path):
    pattern = f"a{{1,{len(end)}}}"
    with monkeypatch.context() as patches:
        replace_check(patches, tmp_path, "interrupted", end)
        with pytest.raises(errors.UserError, match="cannot be checked now: ") as caught:
            grammar.of_source("regex", pattern, VOCABULARY)
        assert not isinstance(caught.value, errors.InputError)
    assert grammar.of_source("regex", pattern, VOCABULARY).source == pattern


def test_an_abandoned_check_ends(monkeypatch, tmp_path):
    replace_check(monkeypatch, tmp_path, "hangs", "time.sleep(1e6)")
    with pytest.raises(errors.UserError, match="nobody waits for it any more"):
        grammar.compiled(Grammar("regex", "ab?", VOCABULARY), lambda: True)


AMBIGUOUS = """
start: (a|b|c)*
a: "a" | "a" a | a b
b: "a" | b "a" | a c
c: | c c | "a"
"""


def test_an_ambiguous_grammar_exceeds_the_limits_soon():
    masks = np.zeros((33, 1), np.int32)
    matcher = grammar.of_source("lark", AMBIGUOUS, VOCABULARY).matcher(timed=False)
    for _ in range(100):
        matcher.fill(masks, [A] * 32, ends=(END,))
        if not masks[0, 0] >> A & 1:
            break
        matcher.advance([A])
    assert names(np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little"))) == {END}
    assert not matcher.may_end
    assert "Current row has" in matcher.problem


def test_a_grammar_fails_when_its_masks_take_too_long(monkeypatch):
    """The budget belongs to all outputs of the grammar, and to no other grammar."""
    slow, other = (grammar.compiled(Grammar("regex", "a*", VOCABULARY)) for _ in range(2))
    monkeypatch.setattr(grammar, "ROW_SECONDS", -1.0)
    monkeypatch.setattr(grammar, "MASK_SECONDS", 9.0)
    slow.budget.seconds = 2.5
    one, two, untimed = slow.matcher(), slow.matcher(), slow.matcher(timed=False)
    assert filled(one, [A])[0] == {"a", END}
    assert filled(one, [A])[0] == {END}, "the drafts' rows were too much"
    assert not one.may_end
    assert "take too much time" in one.problem
    assert two.may_end, "until it needs a mask"
    assert filled(two)[0] == {END}
    assert filled(untimed, [A])[0] == {"a", END}
    other.budget.seconds = 9.0
    assert filled(other.matcher(), [A])[0] == {"a", END}
