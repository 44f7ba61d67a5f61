"""Reads the bodies of requests: OpenAI's, with vLLM's extensions, and SGLang's.

Every function raises RequestError, naming the field, if one is invalid or not supported.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from dflash import errors
from dflash.serving import completion_request as requests
from dflash.serving import encoding, messages_api, validation
from dflash.serving.answers import check_reasoning, template_variables, with_answer
from dflash.serving.bodies import (
    Body,
    ChatBody,
    ChatPromptBody,
    CompletionBody,
    DetokenizeBody,
    GenerateBody,
    OutputBody,
    TokenizeChatBody,
    TokenizeTextBody,
)
from dflash.serving.completion_request import CompletionRequest, ResponseOptions
from dflash.serving.messages_api import MessagesBody
from dflash.serving.responses_api import ResponsesBody, chat_of, renamed
from dflash.serving.served_model import ServedModel
from dflash.serving.validation import RequestError, unsupported
from dflash.text import special_tokens

Fields = TypeVar("Fields", bound=Body)
# End of a message that an answer continues; a Unicode noncharacter, reserved for internal use.
_UNFINISHED = "\ufdd2"


def read_completion(body: Mapping[str, Any], model: ServedModel) -> CompletionRequest:
    """Reads the body of /v1/completions."""
    fields = _parse(CompletionBody, body, model)
    prompts, _ = encoding.encode_prompts(
        fields.prompt, "prompt", model, add_special_tokens=fields.add_special_tokens
    )
    return _request(fields, model, prompts, fields.logprobs, echo=fields.echo)


def read_chat(body: Mapping[str, Any], model: ServedModel) -> CompletionRequest:
    """Reads the body of /v1/chat/completions."""
    fields = _parse(ChatBody, body, model)
    if fields.top_logprobs is not None and not fields.logprobs:
        raise RequestError("top_logprobs: needs logprobs: true", param="top_logprobs")
    logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
    prompt = render_chat(fields, model)
    request = _request(fields, model, (encode_chat(prompt, model),), logprobs)
    return with_answer(request, fields, model, prompt)


def read_response(
    body: Mapping[str, Any], model: ServedModel
) -> tuple[CompletionRequest, ResponsesBody]:
    """Returns the request of a body of /v1/responses, and the body, which the response repeats."""
    fields = _parse(ResponsesBody, body, model)
    try:
        return read_chat(chat_of(fields, body), model), fields
    except RequestError as error:
        raise renamed(error) from error


def read_messages(body: Mapping[str, Any], model: ServedModel) -> CompletionRequest:
    """Reads the body of /v1/messages."""
    fields = _parse(MessagesBody, body, model)
    if fields.max_tokens is None:
        raise RequestError("max_tokens: required", param="max_tokens")
    try:
        return read_chat(messages_api.chat_of(fields, body, model), model)
    except RequestError as error:
        raise messages_api.renamed(error) from error


def count_tokens(body: Mapping[str, Any], model: ServedModel) -> dict[str, Any]:
    """Returns the response of /v1/messages/count_tokens: the length of a prompt."""
    fields = _parse(MessagesBody, body, model)
    try:
        chat = _parse(ChatBody, messages_api.chat_of(fields, body, model), model)
        return {"input_tokens": len(encode_chat(render_chat(chat, model), model))}
    except RequestError as error:
        raise messages_api.renamed(error) from error


def tokenize(body: Mapping[str, Any], model: ServedModel) -> dict[str, Any]:
    """Returns the response of vLLM's /tokenize: the token ids of a prompt or of messages."""
    if body.get("prompt") is None:
        fields = _parse(TokenizeChatBody, body, model)
        ids = encode_chat(render_chat(fields, model), model)
    else:
        fields = _parse(TokenizeTextBody, body, model)
        ids = encoding.encode_text(
            fields.prompt, "prompt", model, add_special_tokens=fields.add_special_tokens
        )
    texts = [model.names.of(token) for token in ids] if fields.return_token_strs else None
    answer = {"count": len(ids), "max_model_len": model.max_length, "tokens": list(ids)}
    return answer | {"token_strs": texts}


def detokenize(body: Mapping[str, Any], model: ServedModel) -> dict[str, Any]:
    """Returns the response of vLLM's /detokenize: the text of token ids."""
    fields = _parse(DetokenizeBody, body, model)
    ids = encoding.token_ids(fields.tokens, "tokens", model)
    return {"prompt": model.tokenizer.decode(ids, special_tokens=True)}


def render_chat(fields: ChatPromptBody, model: ServedModel) -> str:
    """Renders a chat; raises RequestError if the template rejects it or does not read a field."""
    settings = fields.chat_template_kwargs
    variables = {name: value for name, value in settings.items() if value is not None}
    for name in ("messages", "add_generation_prompt", "tools"):
        if name in variables:
            param = f"chat_template_kwargs.{name}"
            raise RequestError(f"{param}: give {name} beside chat_template_kwargs", param=param)
    variables = template_variables(fields, model) | variables
    check_reasoning(variables, model)
    messages = [message.for_template() for message in fields.messages]
    try:
        if fields.continue_final_message:
            return _render_unfinished(messages, fields, model, variables)
        return model.tokenizer.render_chat(
            messages, add_generation_prompt=fields.add_generation_prompt, **variables
        )
    except (errors.InputError, TypeError) as error:
        raise encoding.input_error(error, "messages", model.root) from error


def _render_unfinished(
    messages: list[dict[str, Any]],
    fields: ChatPromptBody,
    model: ServedModel,
    variables: Mapping[str, Any],
) -> str:
    """Renders a chat up to the end of its last message, which the answer continues."""
    *earlier, last = messages
    name, text = "continue_final_message", last.get("content")
    if "add_generation_prompt" in fields.model_fields_set and fields.add_generation_prompt:
        raise RequestError(f"{name}: not together with add_generation_prompt: true", param=name)
    if last["role"] != "assistant" or last.get("tool_calls") or not isinstance(text, str):
        raise RequestError(f"{name}: the last message is no text of the assistant", param=name)
    unfinished = {**last, "content": text + _UNFINISHED}
    rendered = model.tokenizer.render_chat(
        [*earlier, unfinished], add_generation_prompt=False, **variables
    )
    rendered = rendered.rpartition(_UNFINISHED)[0]
    if not text or not special_tokens.without_marks(rendered).endswith(text):
        raise unsupported(name, "the chat template does not render the last message as it is")
    return rendered


def encode_chat(prompt: str, model: ServedModel) -> tuple[int, ...]:
    """Encodes a rendered chat; raises RequestError if it is too long."""
    try:
        ids = encoding.encode_within(
            prompt, model.tokenizer.encode_rendered, "messages", model.max_length
        )
    except errors.InputError as error:
        raise encoding.input_error(error, "messages", model.root) from error
    return encoding.check_prompt(ids, "messages", model)


def _parse(kind: type[Fields], body: Mapping[str, Any], model: ServedModel) -> Fields:
    # The model first, since its error has a status of its own.
    requests.adapter_number(body.get("model"), model)
    return validation.parse(kind, body)


def _request(
    fields: OutputBody,
    model: ServedModel,
    prompts: tuple[tuple[int, ...], ...],
    logprobs: int | None,
    *,
    echo: bool = False,
) -> CompletionRequest:
    stream = fields.stream_options
    if not fields.stream and (stream.include_usage or stream.continuous_usage_stats):
        raise RequestError("stream_options: needs stream: true", param="stream_options")
    if fields.include_metrics and (fields.n > 1 or len(prompts) > 1):
        raise RequestError("include_metrics: supports only one output", param="include_metrics")
    options = ResponseOptions(
        stream=fields.stream,
        usage=stream.include_usage,
        running_usage=stream.continuous_usage_stats,
        echo=echo,
        logprobs=logprobs,
        special_tokens=not fields.skip_special_tokens,
        stop=fields.include_stop_str_in_output,
        drafts=fields.show_drafts,
        metrics=fields.include_metrics,
        token_ids=fields.return_token_ids,
        prompt_logprobs=fields.prompt_logprobs,
        reasoning=getattr(fields, "include_reasoning", True),
    )
    if options.stream and options.scored is not None:
        name = "echo" if fields.prompt_logprobs is None else "prompt_logprobs"
        raise unsupported(name, "log-probabilities of prompts are not streamed")
    request = requests.complete(fields, model, prompts, options, fields.cache_salt)
    adapter = requests.adapter_number(fields.model, model)
    return dataclasses.replace(request, priority=fields.priority, adapter=adapter)


def read_generate(body: Mapping[str, Any], model: ServedModel) -> tuple[CompletionRequest, bool]:
    """Returns the request of a body of /generate, and whether the response is a list of outputs."""
    fields = validation.parse(GenerateBody, body)
    if (fields.text is None) == (fields.input_ids is None):
        raise RequestError("text: give either text or input_ids", param="text")
    param, kind = ("input_ids", list) if fields.text is None else ("text", str)
    kinds = {kind: encoding.PROMPT_KINDS[kind]}
    prompts, several = encoding.encode_prompts(getattr(fields, param), param, model, kinds=kinds)
    sampling = fields.sampling_params
    options = ResponseOptions(
        stream=fields.stream,
        logprobs=fields.top_logprobs_num if fields.return_logprob else None,
        special_tokens=not sampling.skip_special_tokens,
    )
    request = requests.complete(sampling, model, prompts, options, fields.cache_salt)
    adapter = requests.adapter_number(fields.lora_path or None, model, "lora_path")
    request = dataclasses.replace(request, adapter=adapter)
    several = several or request.choices > 1
    if options.stream and several:
        raise RequestError("stream: true supports only one prompt and n=1", param="stream")
    return request, several
