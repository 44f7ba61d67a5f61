"""Table of the formats, and the format of a chat template."""

import dataclasses
import functools
import re
from collections.abc import Mapping

from dflash.text.chat_formats import gemma4, harmony, json_calls, qwen3_coder
from dflash.text.chat_formats.reader import Parser, Reader, Steps
from dflash.text.chat_formats.rules import (
    THINK,
    AnswerRules,
    Marks,
    TargetTokens,
    Thinking,
    ToolFormat,
    read_thinking,
)

# Earlier entries are tried first, since a template may have the signs of a later one, too.
FORMATS: Mapping[str, ToolFormat] = {
    "harmony": harmony.FORMAT,
    "qwen3_coder": qwen3_coder.FORMAT,
    "hermes": json_calls.HERMES,
    "kimi_k2": json_calls.KIMI_K2,
    "llama3_json": json_calls.LLAMA3,
    "gemma4": gemma4.FORMAT,
    "deepseek_v3": json_calls.DEEPSEEK_V3,
    "deepseek_v31": json_calls.DEEPSEEK_V31,
    "mistral_v11": json_calls.MISTRAL_V11,
    "mistral_v13": json_calls.MISTRAL_V13,
    "mistral_v7": json_calls.MISTRAL_V7,
    "mistral_v3": json_calls.MISTRAL_V3,
}
_NO_CALLS = ToolFormat()
# Gemma 4, Mistral and Seed-OSS come after <think>.
_MARKS = (
    THINK,
    Marks("<|channel>", "<channel|>", "thought\n"),
    Marks("[THINK]", "[/THINK]"),
    Marks("<seed:think>", "</seed:think>"),
)
_TOOLS = re.compile(r"\btools\b")  # Variable of templates.
# Variables of templates that let a model reason, or set how much.
_SETTINGS = ("enable_thinking", "thinking", "reasoning_effort")


@dataclasses.dataclass(frozen=True)
class ChatFormat:
    """Format in which a model writes its answers in a chat.

    Attributes:
      tools: Format of its calls; None if it is unknown.
      thinks: Whether an answer may begin with reasoning between `marks`.
      has_unknown_reasoning: Whether it may have reasoning that no format here describes.
      shows_tools: Whether the chat template shows tools to the model.
    """

    tools: ToolFormat | None = None
    thinks: bool = False
    marks: Marks = THINK
    has_unknown_reasoning: bool = False
    shows_tools: bool = True

    @property
    def name(self) -> str:
        """Name of the format of calls; "none" if there is none."""
        return next((name for name, entry in FORMATS.items() if entry is self.tools), "none")

    @property
    def has_channels(self) -> bool:
        """True if all answers need a parser, also those without reasoning and calls."""
        return self._tools.reads_thinking

    @property
    def reasons(self) -> bool:
        """True if answers may have reasoning."""
        return self.thinks or self._tools.reads_thinking

    @property
    def markers(self) -> frozenset[str]:
        """Texts that the parser must see, which may be special tokens."""
        return frozenset((*self._tools.markers, *(self.marks[:2] if self.thinks else ())))

    def end_ids(self, spellings: Mapping[int, str]) -> tuple[int, ...]:
        """Returns the tokens that end an answer besides those of the model, by their spellings."""
        return tuple(token for token, text in spellings.items() if text in self._tools.ends)

    def thinking(self, prompt: str) -> Thinking | None:
        """Returns who begins the reasoning of the answer to a prompt; None if it has none."""
        prompt = prompt.rstrip()
        if not self.thinks or prompt.endswith(self.marks.end):
            return None
        return "opened" if prompt.endswith(self.marks.opening.rstrip()) else "optional"

    def parser(self, rules: AnswerRules) -> Parser:
        """Returns a parser of one answer."""
        rules = dataclasses.replace(rules, marks=self.marks)
        return Parser(functools.partial(self._read, rules=rules))

    def grammar(self, rules: AnswerRules, tokens: TargetTokens) -> str:
        """Returns the grammar of answers, in llguidance's dialect of Lark."""
        return self._tools.grammar(dataclasses.replace(rules, marks=self.marks), tokens)

    @property
    def _tools(self) -> ToolFormat:
        return self.tools or _NO_CALLS

    def _read(self, reader: Reader, rules: AnswerRules) -> Steps[None]:
        if not self._tools.reads_thinking:
            yield from read_thinking(reader, rules)
        has_parts = rules.tools or self._tools.reads_thinking
        yield from (self._tools if has_parts else _NO_CALLS).read(reader, rules)


PLAIN = ChatFormat()


def format_of(template: str, *, tools: str = "auto", thinking: str = "auto") -> ChatFormat:
    """Returns the format of a chat template.

    Args:
      tools: Name of the format of calls; "auto" finds it by the template, "none" is none.
      thinking: "think" if answers may begin with reasoning, "none", or "auto".
    """
    if tools == "auto":
        matching = (
            entry for entry in FORMATS.values() if all(sign in template for sign in entry.signs)
        )
        chosen = next(matching, None)
    else:
        chosen = FORMATS.get(tools)
    # Those that DeepSeek publishes render calls, but no tools.
    shows_tools = tools != "auto" or chosen is None or bool(_TOOLS.search(template))
    reads_thinking = chosen is not None and chosen.reads_thinking
    written = next((marks for marks in _MARKS if marks.end in template), None)
    thinks = thinking == "think" or (thinking == "auto" and written is not None)
    if thinks and not reads_thinking:
        return ChatFormat(chosen, True, written or THINK, shows_tools=shows_tools)
    is_unknown = thinking == "auto" and any(setting in template for setting in _SETTINGS)
    is_unknown = is_unknown and not reads_thinking
    return ChatFormat(chosen, has_unknown_reasoning=is_unknown, shows_tools=shows_tools)
