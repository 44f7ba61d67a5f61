import pytest
from support.trained_tokenizers import train_byte_level

from dflash import errors
from dflash.data import supervision
from dflash.data.example import Example
from dflash.text import special_tokens, tokenizer_loading

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
STRIPPED = CHATML.replace("m.content }}", "m.content.split('</think>')[-1] }}")
OPENED = STRIPPED.replace("<|assistant|>{%", "<|assistant|><think>\n{%")
CALLS = CHATML.replace(
    "{{ m.content }}",
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for call in m.tool_calls or [] %}[{{ call.function | tojson }}]{% endfor %}",
)
CALL = [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}]
THOUGHT = "<think>\nHm.\n</think>\n\n"


def user(text, **fields):
    return {"role": "user", "content": text, **fields}


def bot(text, **fields):
    return {"role": "assistant", "content": text, **fields}


@pytest.fixture
def segments(words_directory, tmp_path):
    """Returns what a template makes of messages: a list of (text, learned) for each document."""

    def cut(template, *messages, **fields):
        for path in words_directory.iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        (tmp_path / "chat_template.jinja").write_text(template)
        words = tokenizer_loading.load_tokenizer(tmp_path)
        documents = supervision.segments(Example("t", "s", messages, **fields), words)
        return [
            [(special_tokens.without_marks(text), learned) for text, learned in document]
            for document in documents
        ]

    return cut


@pytest.fixture
def answer(segments):
    """Returns (prompt, answer) of a conversation with one answer."""

    def only(template, *messages, **fields):
        (((prompt, _), (text, _)),) = segments(template, *messages, **fields)
        return prompt, text

    return only


@pytest.fixture
def failure(segments):
    def fail(template, *messages, **fields):
        with pytest.raises(errors.InputError) as caught:
            segments(template, *messages, **fields)
        return str(caught.value)

    return fail


def test_answers_are_learned_up_to_their_end_token(segments):
    ((first, *rest),) = segments(CHATML, user("a"), bot("b"), user("c"), bot("d"))
    assert first == ("<|user|>a<|end|>\n<|assistant|>", False)
    assert rest == [
        ("b<|end|>", True),
        ("\n<|user|>c<|end|>\n<|assistant|>", False),
        ("d<|end|>", True),
    ]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # The first release of Llama 3 always ends with the generation prompt.
        ("{% if add_generation_prompt %}<|assistant|>{% endif %}", "<|assistant|>"),
        # Phi-3 ends finished conversations with a token of its own.
        ("{% endif %}", "{% else %}</s>{% endif %}"),
        ("<|end|>\n{% endfor %}", "<|end|> \n{% endfor %}"),
    ],
)
def test_nothing_after_the_end_token_is_learned(segments, before, after):
    ((_, one, _, two),) = segments(
        CHATML.replace(before, after), user("a"), bot("b"), user("c"), bot("d")
    )
    assert (one, two) == (("b<|end|>", True), ("d<|end|>", True))


def test_templates_that_rewrite_earlier_answers(segments):
    """Some templates show the reasoning of the last answer only."""
    thought = "{% if loop.last and m.role == 'assistant' %}[thought]{% endif %}{{ m.content }}"
    one, two = segments(
        CHATML.replace("{{ m.content }}", thought), user("a"), bot("b"), user("c"), bot("d")
    )
    assert one == [("<|user|>a<|end|>\n<|assistant|>", False), ("[thought]b<|end|>", True)]
    assert two == [
        ("<|user|>a<|end|>\n<|assistant|>b<|end|>\n<|user|>c<|end|>\n<|assistant|>", False),
        ("[thought]d<|end|>", True),
    ]


def test_prompts_that_end_with_text_which_answers_do_not_repeat(segments):
    template = CHATML.replace("<|assistant|>{%", "<|assistant|>[open]{%")
    one, two = segments(template, user("a"), bot("b"), user("c"), bot("d"))
    assert one == [("<|user|>a<|end|>\n<|assistant|>[open]", False), ("b<|end|>", True)]
    assert two[1] == ("d<|end|>", True)
    assert two[0][0].endswith("<|assistant|>b<|end|>\n<|user|>c<|end|>\n<|assistant|>[open]")


@pytest.mark.parametrize(
    "message",
    [
        bot("4", reasoning_content="Hm."),
        bot(f"{THOUGHT}4"),
        bot(THOUGHT.removeprefix("<think>\n") + "4"),
    ],
)
def test_reasoning_that_the_template_strips_follows_the_prompt_of_decoding(answer, message):
    prompt, text = answer(OPENED, user("2+2?"), message)
    assert prompt.endswith("<|assistant|><think>\n")
    assert text == "Hm.\n</think>\n\n4<|end|>"


def test_reasoning_in_a_channel_that_the_template_leaves_out(answer):
    """As that of Gemma 4 does, whose third state begins the channel after a result."""
    channel = CHATML + "{# <|channel>thought <channel|> #}"
    opened = channel.replace("<|assistant|>{%", "<|assistant|><|channel>thought\n{%")
    messages = user("a"), bot("b", reasoning_content="Hm.")
    assert answer(channel, *messages)[1] == "<|channel>thought\nHm.\n<channel|>b<|end|>"
    assert answer(opened, *messages)[1] == "Hm.\n<channel|>b<|end|>"


def test_reasoning_that_the_model_itself_begins(answer):
    assert answer(STRIPPED, user("2+2?"), bot(f"{THOUGHT}4"))[1] == f"{THOUGHT}4<|end|>"
    assert answer(CHATML, user("2+2?"), bot(f"{THOUGHT}4"))[1] == f"{THOUGHT}4<|end|>"
    assert answer(CHATML, user("2+2?"), bot("<b>4</b>"))[1] == "<b>4</b><|end|>"


def test_special_tokens_in_reasoning_stay_text(segments, words_directory):
    template = OPENED.replace("<think>", "<|user|><think>")
    ((_, (text, _)),) = segments(template, user("a"), bot("<think>\n<|end|></think>b"))
    assert text == "<|end|></think>b<|end|>"
    words = tokenizer_loading.load_tokenizer(words_directory)
    example = Example("t", "s", (user("a"), bot("<|end|></think>b")))
    ((_, (text, _)),) = supervision.segments(example, words)
    assert [token for token, _ in words.special_ends(text)] == [2]


def test_answers_that_decoding_could_not_have_generated(failure):
    assert failure(OPENED, user("a"), bot("b")) == (
        "messages[1]: the chat template does not continue the prompt of decoding "
        r"(…'a<|end|>\n<|assistant|><think>\n') with this answer: set data.thinking as in the "
        'answers, or "weight": 0 to keep it as context'
    )
    lost = "messages[1]: the chat template leaves out the reasoning of this answer"
    assert failure(CHATML, user("a"), bot("Hm.", reasoning_content="Hm.")) == lost
    split = CHATML.replace("{{ m.content }}", "{{ m.content }}{% if m.tool %}<|end|>{% endif %}")
    assert failure(split, user("a"), bot("b", tool="c")) == (
        "messages[1]: the chat template continues this answer after an end token, where decoding "
        "would have stopped"
    )


def test_calls_and_reasoning_are_learned_as_the_template_renders_them(segments):
    ((_, call, result, text),) = segments(
        CALLS, user("a"), bot("", tool_calls=CALL), {"role": "tool", "content": "b"}, bot("c")
    )
    assert call == ('[{"name": "weather", "arguments": {"city": "Bern"}}]<|end|>', True)
    assert result == ("\n<|tool|>b<|end|>\n<|assistant|>", False)
    assert text == ("c<|end|>", True)
    ((_, text),) = segments(CALLS, user("a"), bot("b", reasoning_content="Hm."))
    assert text == ("<think>Hm.</think>b<|end|>", True)


def test_reasoning_of_calls_is_left_out_once_they_are_answered(segments):
    """As harmony's template does: decoding still read it when it wrote the answer."""
    answered = "messages[-1].role == 'assistant' and not messages[-1].tool_calls"
    template = CHATML.replace(
        "{{ m.content }}",
        "{% if m.thinking and not (m.tool_calls and ANSWERED) %}[{{ m.thinking }}]{% endif %}"
        "{{ m.content }}{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}",
    ).replace("ANSWERED", answered)
    call, result = bot("", tool_calls=CALL, reasoning_content="Look."), user("wet")
    (document,) = segments(
        template, user("Bern?"), call, result, bot("Rain.", reasoning_content="Wet is rain.")
    )
    assert [text for text, learned in document if learned] == [
        '[Look.]{"name": "weather", "arguments": {"city": "Bern"}}<|end|>',
        "[Wet is rain.]Rain.<|end|>",
    ]
    assert document[2][0] == "\n<|user|>wet<|end|>\n<|assistant|>"


def test_calls_may_have_an_end_token_of_their_own(answer, failure):
    end = "{% if m.tool_calls %}<|system|>{% else %}<|end|>{% endif %}"
    call = bot("b", tool_calls=CALL)
    assert answer(CALLS.replace("<|end|>", end), user("a"), call)[1].endswith("}]<|system|>")
    # With a template that always writes the next prompt, its last special token is no end.
    always = end.join(CALLS.split("<|end|>")).replace(
        "{% if add_generation_prompt %}", "{% if 1 %}"
    )
    assert failure(always, user("a"), call) == (
        "messages[1]: the chat template ends this answer without an end token"
    )


def test_fields_that_the_template_leaves_out_are_named(failure, segments):
    ignored = "the chat template does not render this field"
    assert failure(CHATML, user("a"), bot("", tool_calls=CALL)) == (
        f"messages[1].tool_calls: {ignored}"
    )
    assert failure(CHATML, user("a", name="Ann"), bot("b")) == f"messages[0].name: {ignored}"
    assert failure(CHATML, user("a"), bot("b"), user("c"), bot("d", id=7)) == (
        f"messages[3].id: {ignored}"
    )
    assert failure(CHATML, user("a"), bot("b"), variables={"tools": CALL}) == f"tools: {ignored}"
    # The name of a tool only says again which call it belongs to.
    tool = {"role": "tool", "content": "b", "name": "weather", "tool_call_id": "1"}
    assert segments(CALLS, user("a"), bot("", tool_calls=CALL), tool, bot("c"))
    named = CHATML.replace("{{ m.content }}", "{{ m.name }}: {{ m.content }}")
    assert segments(named, user("a", name="Ann"), bot("b"))
    tools = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML
    (((prompt, _), _),) = segments(tools, user("a"), bot("b"), variables={"tools": CALL})
    assert prompt.startswith('[{"type": "function"')


def test_context_is_not_learned(segments):
    ((prompt, text),) = segments(
        CHATML, user("a"), bot("b", mood="c"), user("d"), bot("e"), context_only=(1,)
    )
    assert prompt == (
        "<|user|>a<|end|>\n<|assistant|>b<|end|>\n<|user|>d<|end|>\n<|assistant|>",
        False,
    )
    assert text == ("e<|end|>", True)
    ((_, text),) = segments(
        CHATML, user("a"), bot("b"), user("d"), bot("", mood="c"), context_only=(3,)
    )
    assert text == ("b<|end|>", True)


def test_templates_without_an_end_token(answer, words_directory):
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    assert answer(plain, user("a"), bot("b")) == ("user: a\nassistant: ", "b")


def test_end_tokens_that_are_not_marked_as_special(tmp_path):
    tokenizer = train_byte_level(tmp_path, specials=["<|user|>", "<|assistant|>"])
    tokenizer.add_tokens(["<|end|>", "</think>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    words = tokenizer_loading.load_tokenizer(tmp_path)
    example = Example("t", "s", (user("a"), bot(f"{THOUGHT}4")))
    ((_, text),) = supervision.segments(example, words)
    assert text == (f"{THOUGHT}4<|end|>", True)
