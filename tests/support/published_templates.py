"""Chat templates in the style of published families, with tokenizers that fit them."""

# ruff: noqa: E501  (lines of templates)
import json

from support.trained_tokenizers import train_byte_level

CHATML = """\
{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content']\
 + '<|im_end|>' + '\n'}}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

LLAMA3 = """\
{% set loop_messages = messages %}{% for message in loop_messages %}\
{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'\
 + message['content'] | trim + '<|eot_id|>' %}\
{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}\
"""

ALWAYS_ASSISTANT = LLAMA3.replace("{% if add_generation_prompt %}", "").removesuffix("{% endif %}")

QWEN3 = """\
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system") %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n')\
.split('<think>')[-1].lstrip('\\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n')\
 + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}
                    {{- '\\n' }}
                {%- endif %}
                {%- if tool_call.function %}
                    {%- set tool_call = tool_call.function %}
                {%- endif %}
                {{- '<tool_call>\\n{"name": "' }}
                {{- tool_call.name }}
                {{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}\
{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}\
{% endif %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}\
{% else %}{% set role = message['role'] %}{% endif %}\
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"""

PHI3 = """\
{% for message in messages %}{% if message['role'] == 'system' %}\
{{'<|system|>\\n' + message['content'] + '<|end|>\\n'}}{% elif message['role'] == 'user' %}\
{{'<|user|>\\n' + message['content'] + '<|end|>\\n'}}{% elif message['role'] == 'assistant' %}\
{{'<|assistant|>\\n' + message['content'] + '<|end|>\\n'}}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""

DEEPSEEK_R1 = """\
{% set ns = namespace(system_prompt='') %}{%- for message in messages %}\
{%- if message['role'] == 'system' %}{% set ns.system_prompt = message['content'] %}{%- endif %}\
{%- endfor %}{{bos_token}}{{ns.system_prompt}}{%- for message in messages %}\
{%- if message['role'] == 'user' %}{{'<｜User｜>' + message['content']}}{%- endif %}\
{%- if message['role'] == 'assistant' and message['content'] is none %}\
{%- for tool in message['tool_calls'] %}{{'<｜Assistant｜><｜tool▁call▁begin｜>' + tool['type']\
 + '<｜tool▁sep｜>' + tool['function']['name'] + '\\n' + tool['function']['arguments'] | tojson\
 + '<｜tool▁call▁end｜>'}}{%- endfor %}{{'<｜end▁of▁sentence｜>'}}{%- endif %}\
{%- if message['role'] == 'assistant' and message['content'] is not none %}\
{% set content = message['content'] %}{% if '</think>' in content %}\
{% set content = content.split('</think>')[-1] %}{% endif %}\
{{'<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>'}}{%- endif %}\
{%- if message['role'] == 'tool' %}\
{{'<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>'}}{%- endif %}\
{%- endfor -%}{% if add_generation_prompt %}{{'<｜Assistant｜><think>\\n'}}{% endif %}"""

_LLAMA3_TOKENS = (
    "<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|>",
    *("<|begin_of_text|>", "<|eot_id|>"),
)
# Template, special tokens, beginning-of-sequence token, and the token that ends an answer.
FAMILIES = {
    "chatml": (CHATML, "<|im_start|> <|im_end|>", None, "<|im_end|>"),
    "llama3": (LLAMA3, *_LLAMA3_TOKENS),
    "always_assistant": (ALWAYS_ASSISTANT, *_LLAMA3_TOKENS),
    "qwen3": (QWEN3, "<|im_start|> <|im_end|>", None, "<|im_end|>"),
    "gemma": (GEMMA, "<bos> <start_of_turn> <end_of_turn>", "<bos>", "<end_of_turn>"),
    "phi3": (PHI3, "<|system|> <|user|> <|assistant|> <|end|> <|endoftext|>", None, "<|end|>"),
    "deepseek_r1": (
        DEEPSEEK_R1,
        "<｜begin▁of▁sentence｜> <｜User｜> <｜Assistant｜> <｜end▁of▁sentence｜> <｜tool▁sep｜> "
        "<｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜>",
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
    ),
}


def write(family, directory):
    """Writes the files of a tokenizer with the template of a family; returns its end token."""
    template, specials, bos, end = FAMILIES[family]
    train_byte_level(directory, specials=specials.split())
    eos = "<|endoftext|>" if family == "phi3" else end
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos}
    config |= {"bos_token": bos} if bos else {}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    return end
