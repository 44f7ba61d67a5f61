"""Cuts rendered conversations into the text that a model reads and the text that it learns.

The rule: what is learned of an answer are exactly the tokens that decoding would have had to
generate after its own prompt, ending with the end token. An answer for which the chat template
makes this impossible is an error, unless the example marks it as context.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dflash import errors
from dflash.data.example import Example
from dflash.text import special_tokens
from dflash.text.chat_formats.table import format_of
from dflash.text.chat_template import Messages
from dflash.text.tokenizer import Tokenizer

Segments = list[tuple[str, bool]]  # rendered text, and whether it is learned
_Message = Mapping[str, Any]
_Render = Callable[..., str]  # `Tokenizer.render_chat` with the variables of the example

_PROBE = "an answer 5d41402a"  # text that no conversation contains
_OPENED = re.compile(r"<(\w+)>(\s*)\Z")  # end of a prompt that begins the reasoning
_REASONED = re.compile(r"(\s*(?:<\w+>)?)(.*?)</(\w+)>", re.DOTALL)
# Fields that a template may leave out: `_answer` looks after the reasoning, and the others only say
# which call a result belongs to.
_UNCHECKED = {"assistant": {"reasoning_content"}, "tool": {"name", "tool_call_id"}}


@dataclasses.dataclass(frozen=True)
class _Ending:
    """Text that the chat template writes after an answer.

    Attributes:
      token: Id of the end token; None if answers end without a special token.
      text: Text up to the end token and including it.
      rest: Text after the end token, which decoding never generates.
    """

    token: int | None
    text: str
    rest: str


def segments(example: Example, tokenizer: Tokenizer) -> Iterator[Segments]:
    """Yields each document of a conversation as segments.

    If the template renders earlier answers differently from the last one, each answer ends a
    document of its own.
    """
    render = functools.partial(tokenizer.render_chat, **example.variables)
    document: Segments = []
    so_far, checked, ending = "", 0, None
    for index, message in enumerate(example.messages):
        if message["role"] != "assistant" or not index or index in example.context_only:
            continue
        messages = example.messages[: index + 1]
        question = render(messages[:-1])
        ending = ending or _find_ending(messages[:-1], render, tokenizer)
        _check_fields(example, checked, index, tokenizer)
        try:
            answer = _answer(messages, question, ending, render, tokenizer)
        except errors.InputError as error:
            raise errors.InputError(f"messages[{index}]: {error}") from error
        if document and not question.startswith(so_far):
            yield document
            document, so_far = [], ""
        document += [(question[len(so_far) :], False), (answer, True)]
        so_far, checked = question + answer, index + 1
    if document:
        yield document


def ends_answers(example: Example, tokenizer: Tokenizer) -> bool:
    """Returns whether the chat template ends answers with a special token."""
    render = functools.partial(tokenizer.render_chat, **example.variables)
    return _find_ending(example.opening, render, tokenizer).token is not None


def _find_ending(question: Messages, render: _Render, tokenizer: Tokenizer) -> _Ending:
    _, after = _around_answer(question, render)
    for token, end in tokenizer.special_ends(after):
        return _Ending(token, after[:end], after[end:])
    return _Ending(None, "", after)


def _around_answer(question: Messages, render: _Render) -> tuple[str, str]:
    """Returns what the template writes before and after a plain answer to `question`."""
    answer = {"role": "assistant", "content": _PROBE}
    before, _, after = render([*question, answer], add_generation_prompt=False).rpartition(_PROBE)
    return before, after


def _answer(
    messages: Messages, question: str, ending: _Ending, render: _Render, tokenizer: Tokenizer
) -> str:
    """Returns the last message as decoding would have had to generate it after `question`."""
    message = messages[-1]
    rendered = render(messages, add_generation_prompt=False)
    loses_reasoning = rendered == _render_other_reasoning(messages, render)
    if rendered.startswith(question) and not loses_reasoning:
        return _cut(rendered[len(question) :], ending, tokenizer)
    before, _ = _around_answer(messages[:-1], render)
    opened = _OPENED.search(question)
    if loses_reasoning and (written := _own_channel(message, question, tokenizer)):
        return written + ending.text
    if opened or (loses_reasoning and question == before):
        written = _own_text(message, opened, tokenizer)
        if written is not None:
            return written + ending.text
    elif not loses_reasoning and question.startswith(before) and rendered.startswith(before):
        # The prompt ends with text that the template leaves out of answers.
        return _cut(rendered[len(before) :], ending, tokenizer)
    if loses_reasoning:
        raise errors.InputError("the chat template leaves out the reasoning of this answer")
    head = _shortened(question, before, render(messages[:-1], add_generation_prompt=False))
    if head and rendered.startswith(head):
        return _cut(rendered[len(head) :], ending, tokenizer)
    shown = special_tokens.without_marks(question[-30:])
    raise errors.InputError(
        f"the chat template does not continue the prompt of decoding (…{shown!r}) with this "
        'answer: set data.thinking as in the answers, or "weight": 0 to keep it as context'
    )


def _shortened(question: str, before: str, earlier: str) -> str:
    """Returns the prompt of decoding as the template shortens it before an answer; "" if unknown.

    Harmony's leaves out the reasoning of earlier calls once there is an answer without calls.

    Args:
      question: Prompt of decoding.
      before: Text before a plain answer to it.
      earlier: The prompt without the beginning of an answer.
    """
    begun = question.removeprefix(earlier)
    head, beginning, _ = before.rpartition(begun) if begun else ("", "", "")
    return head + beginning


def _cut(rendered: str, ending: _Ending, tokenizer: Tokenizer) -> str:
    if ending.token is None:
        return rendered.removesuffix(ending.rest)
    ends = tokenizer.special_ends(rendered)
    end_places = [end for token, end in ends if token == ending.token]
    if end_places:
        cut = end_places[0]
    elif ends and not tokenizer.special_ends(ending.rest):
        cut = ends[-1][1]  # a call of a tool may have an end token of its own
    else:
        raise errors.InputError("the chat template ends this answer without an end token")
    if rendered[cut:].strip() != ending.rest.strip():
        raise errors.InputError(
            "the chat template continues this answer after an end token, where decoding would have "
            "stopped"
        )
    return rendered[:cut]


def _render_other_reasoning(messages: Messages, render: _Render) -> str | None:
    """Renders the messages with other reasoning in the last one; returns None if it has none."""
    message = messages[-1]
    content = message["content"]
    reasoned = _REASONED.match(content)
    if message.get("reasoning_content"):
        other = {**message, "reasoning_content": _PROBE}
    elif reasoned and reasoned[2].strip():
        other = {**message, "content": reasoned[1] + _PROBE + content[reasoned.end(2) :]}
    else:
        return None
    return render([*messages[:-1], other], add_generation_prompt=False)


def _own_text(message: _Message, opened: re.Match | None, tokenizer: Tokenizer) -> str | None:
    """Returns reasoning and answer as the model wrote them; None if that cannot be known.

    This is for templates that leave the reasoning out, so that their renderings do not show it.

    Args:
      opened: Match of `_OPENED` in the prompt; None if the model itself began its reasoning.
    """
    content = message["content"]
    field, reasoned = message.get("reasoning_content"), _REASONED.match(content)
    if message.get("tool_calls") or not (opened or (reasoned and not field)):
        return None
    tag = opened[1] if opened else reasoned[3]
    if field:
        reasoning, close, answer = field, f"\n</{tag}>\n\n", content
    else:
        reasoning, close, answer = content.partition(f"</{tag}>")
    if not close:
        return None
    begun = re.match(rf"\s*<{tag}>", reasoning)
    if begun:
        reasoning = reasoning[begun.end() :]
    if opened:
        reasoning = reasoning.removeprefix(opened[2])
    beginning = f"<{tag}>" if begun and not opened else ""
    return beginning + tokenizer.mark(reasoning) + close + tokenizer.mark(answer)


def _own_channel(message: _Message, question: str, tokenizer: Tokenizer) -> str | None:
    """Returns reasoning between other marks than tags, and the answer; None if there is none.

    The template of Gemma 4 leaves out the reasoning of answers without calls.
    """
    chat_format = format_of(tokenizer.chat_template)
    marks, state = chat_format.marks, chat_format.thinking(question)
    reasoning = message.get("reasoning_content")
    if state is None or not marks.label or not reasoning or message.get("tool_calls"):
        return None
    beginning = marks.opening if state == "optional" else ""
    answer = tokenizer.mark(message["content"])
    return f"{beginning}{tokenizer.mark(reasoning)}\n{marks.end}{answer}"


def _check_fields(example: Example, start: int, stop: int, tokenizer: Tokenizer) -> None:
    """Raises InputError if the template ignores a field of the messages from `start` to `stop`."""
    messages = example.messages[: stop + 1]
    render = functools.partial(tokenizer.render_chat, add_generation_prompt=False)

    def check(name: str, messages_without: Messages, variables_without: _Message) -> None:
        try:
            without = render(messages_without, **variables_without)
        except errors.InputError:
            return  # the template needs the field
        if without == render(messages, **example.variables):
            raise errors.InputError(f"{name}: the chat template does not render this field")

    for name in example.variables if not start else ():
        check(name, messages, _without(example.variables, name))
    for place in range(start, stop + 1):
        message = messages[place]
        is_context = place < stop and message["role"] == "assistant"
        unchecked = {"role", "content"} | _UNCHECKED.get(message["role"], set())
        for name in () if is_context else message.keys() - unchecked:
            without_field = [*messages[:place], _without(message, name), *messages[place + 1 :]]
            check(f"messages[{place}].{name}", without_field, example.variables)


def _without(fields: _Message, name: str) -> _Message:
    return {key: value for key, value in fields.items() if key != name}
