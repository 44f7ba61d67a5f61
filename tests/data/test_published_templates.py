"""What is learned with the templates of published families, by transformers as the reference."""

import json
import random

import numpy as np
import pytest
from support import published_templates
from support.golden import import_transformers

from dflash import errors
from dflash.data import corpus, encoding, files
from dflash.text import tokenizer_loading

WORDS = "two plus is four rain in Bern tomorrow naïve 你好 the answer café 3.5 — why not?".split()
KINDS = "plain system turns three_turns field content fields call null mixed".split()

# Kinds that are refused, since the template leaves out a field or rejects a role.
FIELDS = {"field", "fields", "call", "null"}
REFUSED = dict.fromkeys(published_templates.FAMILIES, FIELDS) | {
    "qwen3": set(),
    "gemma": FIELDS | {"system"},
    # The prompt of decoding begins the reasoning, which these have none of.
    "deepseek_r1": set(KINDS) - {"field", "content", "fields"},
}


def talk(rng, low=2, high=9):
    return " ".join(rng.choices(WORDS, k=rng.randint(low, high)))


def conversation(kind, rng):
    """Returns the messages of a conversation of some kind."""

    def turn(**fields):
        answer = {"role": "assistant", "content": talk(rng), **fields}
        return [{"role": "user", "content": talk(rng)}, answer]

    def thought():
        return f"think {rng.getrandbits(40):x} {talk(rng)}"

    call = {"name": "weather", "arguments": {"city": talk(rng, 1, 2), "days": rng.randint(1, 9)}}
    calls = [{"type": "function", "function": call}]
    result = [{"role": "tool", "content": talk(rng)}, {"role": "assistant", "content": talk(rng)}]
    return {
        "plain": lambda: turn(),
        "system": lambda: [{"role": "system", "content": talk(rng)}, *turn(), *turn()],
        "turns": lambda: [*turn(), *turn()],
        "three_turns": lambda: [*turn(), *turn(), *turn()],
        "field": lambda: turn(reasoning_content=thought()),
        "content": lambda: turn(content=f"<think>\n{thought()}\n</think>\n\n{talk(rng)}"),
        "fields": lambda: [*turn(reasoning_content=thought()), *turn(reasoning_content=thought())],
        "call": lambda: [*turn(content="", tool_calls=calls), *result],
        "null": lambda: [*turn(content=None, tool_calls=calls), *result],
        "mixed": lambda: [*turn(), *turn(content=f"<think>{thought()}</think>{talk(rng)}")],
    }[kind]()


def reference(theirs, messages, end, family, thinking):
    """Returns (prompt, answer) of each answer as token ids; None if they cannot be known."""
    pairs = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        try:
            prompt = theirs.apply_chat_template(
                messages[:index],
                add_generation_prompt=True,
                return_dict=False,
                enable_thinking=thinking,
            )
            whole = theirs.apply_chat_template(messages[: index + 1], return_dict=False)
        except Exception:
            return None
        shown = theirs.decode(whole)
        head, closed, _ = message["content"].partition("</think>")
        reasoning = message.get("reasoning_content") or (head if closed else "")
        reasoning = reasoning.removeprefix("<think>").strip()
        if message.get("tool_calls") and '"days"' not in shown:
            return None
        if reasoning in shown and whole[: len(prompt)] == prompt:
            answer = whole[len(prompt) :]
            pairs.append((prompt, answer[: answer.index(end) + 1]))
        elif family == "deepseek_r1" and reasoning:
            own = f"{message.get('reasoning_content')}\n</think>\n\n{message['content']}"
            if closed:
                own = message["content"].removeprefix("<think>").removeprefix("\n")
            pairs.append((prompt, [*theirs.encode(own, add_special_tokens=False), end]))
        else:
            return None
    return pairs


def learned(documents):
    """Returns (tokens before it, its tokens) of each supervised run."""
    pairs = []
    for document in documents:
        marks = np.concatenate([[False], document >= corpus.SUPERVISED, [False]])
        ids = (document & ~corpus.SUPERVISED).tolist()
        edges = np.flatnonzero(np.diff(marks)).tolist()
        pairs += [
            (ids[:start], ids[start:stop])
            for start, stop in zip(edges[::2], edges[1::2], strict=True)
        ]
    return pairs


@pytest.mark.parametrize(
    ("family", "thinking"),
    [*((family, True) for family in published_templates.FAMILIES), ("qwen3", False)],
)
def test_what_is_learned_is_what_decoding_would_have_had_to_generate(family, thinking, tmp_path):
    _, transformers = import_transformers()
    end = published_templates.write(family, tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = tokenizer_loading.load_tokenizer(tmp_path, enable_thinking=thinking)
    rng = random.Random(family)
    refused = set()
    for kind in KINDS * 2:
        messages = conversation(kind, rng)
        # As users of transformers write calls without a text.
        written = [{**message, "content": message["content"] or ""} for message in messages]
        expected = reference(theirs, written, theirs.convert_tokens_to_ids(end), family, thinking)
        example = files.example_of(json.loads(json.dumps({"messages": messages})))
        if expected is None:
            refused.add(kind)
            with pytest.raises(errors.InputError, match=r"chat template|tool_calls"):
                list(encoding.encode(example, ours))
        else:
            assert learned(encoding.encode(example, ours)) == expected, kind
    # Without thinking, Qwen3's prompt says that there is no reasoning.
    assert refused == (REFUSED[family] if thinking else {"field", "fields", "content", "mixed"})
