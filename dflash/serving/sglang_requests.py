"""Reads the body of SGLang's /generate."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from dflash.serving import completion_request as requests
from dflash.serving import encoding, validation
from dflash.serving.bodies import GenerateBody
from dflash.serving.completion_request import CompletionRequest, ResponseOptions
from dflash.serving.request_error import RequestError
from dflash.serving.served_model import ServedModel


def read_generate(body: Mapping[str, Any], model: ServedModel) -> tuple[CompletionRequest, bool]:
    """Reads the body of /generate.

    Returns:
      The request, and whether the response is a list, as it is for several prompts or outputs.
    Raises:
      RequestError: A field is invalid or not supported; the error names it.
    """
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
