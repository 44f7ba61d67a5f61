import math

import pytest
import yaml

from dflash.config import strict_yaml

INVALID = "not valid YAML"
ALIASES = "anchors and aliases are not supported; share keys through `base`"


def plain(node):
    if isinstance(node.value, dict):
        return {key: plain(item) for key, item in node.value.items()}
    if isinstance(node.value, tuple):
        return [plain(item) for item in node.value]
    return node.value


def value(text):
    node, problems = strict_yaml.parse(f"key: {text}\n", "f.yml")
    assert problems == []
    return plain(node)["key"]


def problems(text):
    return strict_yaml.parse(text, "f.yml")[1]


# What other readers of YAML take for something else.
TEXTS = """off on yes no y True FALSE Null none nan inf 12:30 1_000 010 0x10 0b1 2001-01-01 1.2.3 e5
. = 1234567890123456789"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1e-3", 1e-3), ("1E5", 1e5), ("-2.5e+3", -2500.0), (".5", 0.5), ("3.", 3.0), ("3", 3),
        ("-0", 0), ("+7", 7), (".inf", math.inf), ("-.inf", -math.inf), ("true", True),
        ("false", False), ("null", None), ("~", None), ("", None),
        ("[1, [2.5, x]]", [1, [2.5, "x"]]),
        *((text, text) for text in TEXTS.split()),
        ("'3'", "3"),
        ('"true"', "true"),
        ("|-\n  two\n  lines", "two\nlines"),
    ],
)  # fmt: skip
def test_a_scalar_means_what_it_looks_like(text, expected):
    result = value(text)
    assert result == expected
    assert type(result) is type(expected)


def test_nan_is_a_number():
    assert math.isnan(value(".nan"))


def test_sources_name_the_line_of_the_key():
    text = "a:\n  b:\n    5\n  c: [1,\n    2]\n"
    node, _ = strict_yaml.parse(text, "f.yml")
    inner = node.value["a"].value
    assert inner["b"].source == "f.yml:2"
    assert inner["c"].source == "f.yml:4"
    assert inner["c"].value[1].source == "f.yml:5"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: !!python/object:os.system {}\n", f":1: {INVALID}: tags are not supported, got tag:yaml"
         ".org,2002:python/object:os.system"),
        ("a: 1\nb: !!str 1\n",
         f":2: {INVALID}: tags are not supported, got tag:yaml.org,2002:str"),
        ("a: &x 1\nb: *x\n", f":1: {INVALID}: {ALIASES}"),
        ("a: 1\nb: *x\n", f":2: {INVALID}: {ALIASES}"),
        ("a: [1, 2\nb: 3\n", f":2: {INVALID}: expected ',' or ']', but got ':'"),
        ("a: 1\n\tb: 2\n",
         f":2: {INVALID}: found character '\\t' that cannot start any token"),
        ("a: 1\n---\nb: 2\n", f":2: {INVALID}: but found another document"),
        ("a: \x07\n", f": {INVALID}: special characters are not allowed"),
        ("[1, 2]\n", ": expected a mapping of keys to values, got a list"),
        ("hello\n", ": expected a mapping of keys to values, got a single value"),
        ("? [1]\n: 2\n", ":1: a key must be a plain name, got a list"),
        ("[" * 5000, f":1: {INVALID}: nested deeper than 40 levels"),
    ],
)  # fmt: skip
def test_what_is_refused_is_one_line(text, expected):
    assert problems(text) == [f"f.yml{expected}"]


def test_each_duplicate_key_is_a_line():
    assert problems("a: 1\nb: {c: 1, c: 2}\na: 2\n") == [
        "f.yml:2: duplicate key 'c', first on line 2",
        "f.yml:3: duplicate key 'a', first on line 1",
    ]


def test_of_duplicate_keys_the_rest_is_still_read():
    node, found = strict_yaml.parse("a: 1\na: 2\nb: 3\n", "f.yml")
    assert plain(node) == {"a": 1, "b": 3}
    assert len(found) == 1


@pytest.mark.parametrize(
    "text", ["1e-3", "off", "yes", "12:30", "010", "1_000", "null", "true", "3", "~", "", "=", "<<"]
)
def test_a_dumped_string_is_a_string_for_every_reader(text):
    dumped = strict_yaml.dump({"key": text})
    assert plain(strict_yaml.parse(dumped, "f.yml")[0]) == {"key": text}
    assert yaml.safe_load(dumped) == {"key": text}


def test_a_repeated_list_is_dumped_without_an_alias():
    shared = [1, 2]
    assert strict_yaml.dump({"a": shared, "b": shared}) == "a: [1, 2]\nb: [1, 2]\n"
