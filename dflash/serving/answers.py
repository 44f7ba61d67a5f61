"""Tool calls and reasoning of chats: what an answer may contain, and the grammar of that."""

import contextlib
import dataclasses
import json
import typing
from collections.abc import Mapping
from typing import Any

from dflash import errors
from dflash.config import serve_schema
from dflash.serving.bodies import ChatBody, ChatPromptBody, Effort
from dflash.serving.completion_request import CompletionRequest, check_structure, one_value
from dflash.serving.served_model import ServedModel
from dflash.serving.structured_output import StructuredOutput
from dflash.serving.validation import RequestError, unsupported
from dflash.text import jsonl
from dflash.text.chat_formats.rules import AnswerRules, TargetTokens, Tool
from dflash.text.chat_template import NO_EFFORT
from dflash.text.grammar_compiler import inline_schema

_EFFORT = "reasoning_effort"  # variable of a chat template
_QUESTION = [{"role": "user", "content": "a"}]
_THINKING_LIMITS = ("max_thinking_tokens", "thinking_budget", "thinking_token_budget")


def template_variables(fields: ChatPromptBody, model: ServedModel) -> dict[str, Any]:
    """Returns variables of the chat template; raises RequestError for a field that it ignores."""
    variables: dict[str, Any] = {}
    if fields.tool_choice.allowed and fields.tools:
        variables["tools"] = [tool.for_template() for tool in fields.tools]
    switches = model.tokenizer.switches_thinking
    if fields.enable_thinking is not None:
        _check_read("enable_thinking", switches)
        variables["enable_thinking"] = fields.enable_thinking
    if fields.reasoning_effort is not None:
        _check_read("reasoning_effort", switches or _EFFORT in model.tokenizer.chat_template)
        variables[_EFFORT] = _nearest_effort(fields.reasoning_effort, model)
    return variables


def _nearest_effort(effort: str, model: ServedModel) -> str:
    """Returns the effort that is nearest to a given one and that the chat template accepts.

    Templates raise for all but a few: that of Qwen3.8 knows low, medium and xhigh.
    """
    if effort in NO_EFFORT:
        return effort
    efforts = [name for name in typing.get_args(Effort) if name not in NO_EFFORT]
    place = efforts.index(effort)
    # Of two that are equally near, the one with more reasoning counts.
    places = {name: (abs(at - place), -at) for at, name in enumerate(efforts)}
    for name in sorted(efforts, key=places.get):
        with contextlib.suppress(errors.InputError):
            model.tokenizer.render_chat(_QUESTION, **{_EFFORT: name})
            return name
    return effort


def check_reasoning(variables: Mapping[str, Any], model: ServedModel) -> None:
    """Raises RequestError if variables ask for reasoning that the server cannot tell apart."""
    for name in ("enable_thinking", "thinking", _EFFORT):
        is_asked = variables.get(name) not in (None, False, *NO_EFFORT)
        if is_asked and model.chat_format.has_unknown_reasoning:
            reason = "it is not known how this model writes its reasoning"
            raise unsupported(name, f"{reason}; serve.reasoning=none leaves it in the text")


def _check_read(param: str, is_read: bool) -> None:
    if not is_read:
        raise unsupported(param, "the chat template of this model has no such setting")


def with_answer(
    request: CompletionRequest, fields: ChatBody, model: ServedModel, prompt: str
) -> CompletionRequest:
    """Adds the parser of answers to the request of a chat, and their grammar if they need one.

    Raises:
      RequestError: The model cannot answer in this way; the error names the field.
    """
    rules = _rules(fields, model, prompt)
    structure = request.structure
    has_wrapping = rules.thinking is not None or model.chat_format.has_channels
    if structure is not None and structure.kind not in ("json_object", "json_schema"):
        if rules.constrain:
            reason = "not together with tools or a limit on thinking"
            raise unsupported(structure.param, reason)
        return request
    if fields.show_drafts and (rules.constrain or (structure is not None and has_wrapping)):
        raise unsupported("show_drafts", "not together with tools, reasoning or schemas")
    if rules.constrain or (structure is not None and has_wrapping):
        structure = _structure(rules, structure, fields, model)
        request = dataclasses.replace(request, structure=structure)
        check_structure(request)
    if fields.show_drafts or not (rules.tools or has_wrapping):
        return request
    return dataclasses.replace(request, chat_format=model.chat_format, rules=rules)


def _rules(fields: ChatBody, model: ServedModel, prompt: str) -> AnswerRules:
    limit = one_value(fields, _THINKING_LIMITS)
    if limit is not None and not model.chat_format.reasons:
        raise unsupported(_limit_name(fields), "this model does not write its reasoning apart")
    thinking = None if fields.continue_final_message else model.chat_format.thinking(prompt)
    if thinking is None and not model.chat_format.has_channels:
        limit = None  # The prompt asks for no reasoning.
    messages = fields.messages
    return AnswerRules(
        tools=_chosen_tools(fields, model),
        must_call=fields.tool_choice.required,
        parallel=fields.parallel_tool_calls,
        thinking=thinking,
        max_thinking_tokens=limit,
        earlier_calls=sum(len(message.tool_calls) for message in messages),
    )


def _chosen_tools(fields: ChatBody, model: ServedModel) -> tuple[Tool, ...]:
    functions = {tool.function.name: tool.function for tool in fields.tools}
    choice = fields.tool_choice
    if len(functions) < len(fields.tools):
        raise RequestError("tools: several functions have the same name", param="tools")
    if choice.name is not None:
        if choice.name not in functions:
            message = f"tool_choice: no tool is named {jsonl.quote(choice.name)}"
            raise RequestError(message, param="tool_choice")
        functions = {choice.name: functions[choice.name]}
    elif choice.required and not functions:
        raise RequestError("tool_choice: needs tools to choose from", param="tool_choice")
    if not choice.allowed or not functions:
        return ()
    if model.chat_format.tools is None:
        known = ", ".join(typing.get_args(serve_schema.ToolFormat)[2:])
        reason = f"it is not known how this model writes calls; set serve.tool_format ({known})"
        raise unsupported("tools", reason)
    if not model.chat_format.shows_tools:
        name = model.chat_format.name
        reason = "the chat template of this model does not show tools to it; describe them in a "
        raise unsupported("tools", f"{reason}message, and set serve.tool_format={name}")
    return tuple(Tool(function.name, function.parameters) for function in functions.values())


def _structure(
    rules: AnswerRules, structure: StructuredOutput | None, fields: ChatBody, model: ServedModel
) -> StructuredOutput:
    """Returns the constraint of an answer with calls, reasoning, and text of a certain form."""
    if structure is not None:
        schema = json.loads(structure.source or '{"type": "object"}')
        rules = dataclasses.replace(rules, content=inline_schema(schema))
    answer_param = "tools" if rules.tools else structure.param if structure else _limit_name(fields)
    places = {tool.function.name: place for place, tool in enumerate(fields.tools)}
    param, parts = answer_param, []
    try:
        tokens = TargetTokens(model.tokenizer.special_spellings, model.vocabulary())
        for tool in rules.tools:
            param = f"tools[{places[tool.name]}].function.parameters"
            schema = json.dumps(tool.closed(tool.parameters))
            parts.append(StructuredOutput("json_schema", schema, param))
            model.chat_format.grammar(AnswerRules((tool,)), tokens)  # to name the tool in errors
        param = answer_param
        source = model.chat_format.grammar(rules, tokens)
    except (errors.InputError, RecursionError) as error:
        raise RequestError(f"{param}: {error}", param=param) from error
    return StructuredOutput(
        "lark", source, answer_param, (*parts, *((structure,) if structure else ()))
    )


def _limit_name(fields: ChatBody) -> str:
    return next(name for name in _THINKING_LIMITS if getattr(fields, name) is not None)
