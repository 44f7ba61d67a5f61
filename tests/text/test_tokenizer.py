"""Tests of tokenizers and streaming, with freshly trained tokenizers."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.golden import import_transformers
from support.trained_tokenizers import (
    LLAMA_TEMPLATE,
    MESSAGES,
    QWEN_TEMPLATE,
    TEXTS,
    failure,
    ignore_merges,
    train_byte_fallback,
    train_byte_level,
    train_metaspace,
    train_sentencepiece,
    train_unigram,
    write_json,
)

from dflash.text import tokenizer as tokenization
from dflash.text.tokenizer_files import SentencePieceTokenizer
from dflash.text.tokenizer_loading import load_tokenizer

TRAINERS = [train_byte_level, train_byte_fallback, train_sentencepiece]


@pytest.fixture(scope="module", params=[*TRAINERS, None])
def any_tokenizer(request, tmp_path_factory):
    if request.param is None:
        return tokenization.ByteTokenizer()
    directory = tmp_path_factory.mktemp("tokenizer")
    request.param(directory)
    return load_tokenizer(directory)


def stream(tokenizer, ids, size=1):
    """Returns the output of a decoder after each chunk of ids, and at the end."""
    decoder = tokenization.IncrementalDecoder(tokenizer)
    shown = [decoder.push(ids[i : i + size]) for i in range(0, len(ids), size)]
    return [*shown, decoder.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_encode_and_decode_round_trip(any_tokenizer, text):
    if not isinstance(any_tokenizer, SentencePieceTokenizer):
        text = text.rstrip()
    ids = any_tokenizer.encode(text)
    assert all(type(token) is int and 0 <= token < any_tokenizer.vocab_size for token in ids)
    assert any_tokenizer.decode(ids) == text


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("text", TEXTS)
def test_streaming_shows_whole_characters(any_tokenizer, text, size):
    ids = any_tokenizer.encode(text)
    shown = stream(any_tokenizer, ids, size)
    assert "".join(shown) == any_tokenizer.decode(ids)
    assert "\ufffd" not in "".join(shown)
    assert shown[-1] == ""


def test_streaming_shows_text_as_soon_as_it_is_certain(any_tokenizer):
    ids = any_tokenizer.encode("Hello 你")
    shown = stream(any_tokenizer, ids)
    assert "".join(shown[:5]) != ""
    assert shown[-2].endswith("你")


@settings(max_examples=40)
@given(text=st.text(alphabet="aé你🦜 \n", min_size=0, max_size=12))
@example(text="你好好")
def test_streaming_any_text(any_tokenizer, text):
    ids = any_tokenizer.encode(text)
    assert "".join(stream(any_tokenizer, ids)) == any_tokenizer.decode(ids)


@settings(max_examples=40)
@given(ids=st.lists(st.integers(0, 299), max_size=40))
def test_streaming_any_ids_of_a_byte_tokenizer(ids):
    """Streaming any tokens, including invalid UTF-8, results in the same text."""
    tokenizer = tokenization.ByteTokenizer()
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@settings(max_examples=60)
@given(ids=st.lists(st.integers(0, 255), max_size=40))
def test_streaming_any_ids(any_tokenizer, ids):
    """Invalid bytes become some number of U+FFFD, and do not delay or garble later text."""
    decoder = tokenization.IncrementalDecoder(any_tokenizer)
    decoder.push(ids)
    held = decoder.flush()
    assert len(held) <= 40
    assert "".join(stream(any_tokenizer, [*ids, *any_tokenizer.encode(" Hello")])).endswith("Hello")


@pytest.fixture(scope="module", params=["bpe", "unigram", "first", "always", "fallback", "never"])
def spaced_tokenizer(request, tmp_path_factory):
    """Returns a tokenizer whose decoder may drop the first space of a text."""
    directory = tmp_path_factory.mktemp("spaced")
    if request.param in ("bpe", "unigram"):
        options = {"model_type": request.param, "add_dummy_prefix": True}
        train_sentencepiece(directory, **options)
    elif request.param == "fallback":
        train_byte_fallback(directory)
    else:
        train_metaspace(directory, request.param)
    return load_tokenizer(directory)


@pytest.mark.parametrize("prompt", ["Hello", "world! ", "你", ""])
@pytest.mark.parametrize("output", [" world", "world", "  two", " 你好", " "])
def test_an_output_is_what_it_adds_to_its_prompt(spaced_tokenizer, prompt, output):
    tokenizer = spaced_tokenizer
    before, ids = tokenizer.encode(prompt), tokenizer.encode("Hello" + output)
    ids = ids[len(tokenizer.encode("Hello")) :]
    added = tokenizer.decode([*before, *ids]).removeprefix(tokenizer.decode(before))
    assert tokenization.decode_output(tokenizer, before, ids) == added
    decoder = tokenization.IncrementalDecoder(tokenizer, prompt=before)
    assert decoder.push(ids) + decoder.flush() == added


def test_a_prompt_that_ends_with_many_special_tokens_is_context(tmp_path):
    train_metaspace(tmp_path, "always")
    tokenizer = load_tokenizer(tmp_path)
    special = tokenizer.encode("<|im_end|>", special_tokens=True)[-1]
    prompt = [*tokenizer.encode("Hello"), *[special] * 100]
    word = tokenizer.encode("Hello two")[len(tokenizer.encode("Hello")) :]
    assert tokenization.decode_output(tokenizer, prompt, word) == " two"
    assert tokenization.decode_output(tokenizer, [special] * 100, word) == "two"


@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_output_completes_the_last_character_of_its_prompt(size):
    tokenizer, word = tokenization.ByteTokenizer(), "né🦜".encode()
    prompt, output = word[:-size], word[-size:]
    decoder = tokenization.IncrementalDecoder(tokenizer, prompt=prompt)
    assert decoder.push(output) + decoder.flush() == "🦜"
    assert tokenization.decode_output(tokenizer, prompt, output) == "🦜"
    assert tokenization.decode_output(tokenizer, b"a\xff", b"b") == "b"


def test_a_fork_shares_the_tokenizer_and_nothing_else():
    tokenizer = tokenization.ByteTokenizer()
    decoder = tokenization.IncrementalDecoder(tokenizer)
    word = tokenizer.encode("né")
    begin, end = word[:-1], word[-1:]  # The last character's bytes are split.
    assert decoder.push(begin) == "n"
    assert decoder.fork().push(tokenizer.encode("xyz")) != ""
    assert decoder.push(end) == "é"


def test_endless_broken_bytes_are_shown():
    shown = stream(tokenization.ByteTokenizer(), [0xFF] * 100)
    assert "".join(shown[:-1]).count("\ufffd") >= 90


def test_endless_special_tokens_cost_nothing(tmp_path):
    special = train_byte_level(tmp_path).token_to_id("<|im_end|>")
    decoder = tokenization.IncrementalDecoder(load_tokenizer(tmp_path))
    assert decoder.push([special] * 1000) == ""
    assert len(decoder._ids) < 20
    assert decoder.push(load_tokenizer(tmp_path).encode("Hi")) == "Hi"


def test_byte_tokenizer():
    tokenizer = tokenization.ByteTokenizer()
    assert tokenizer.encode("aé") == [0x61, 0xC3, 0xA9]
    assert tokenizer.decode([0x61, 0xC3, 0xA9, 300, 0x62]) == "aé⟨300⟩b"
    assert tokenizer.vocab_size == 256
    chat = tokenizer.encode_chat(MESSAGES)
    assert tokenizer.decode(chat) == "Be brief.\nWhat is 2 < 3 & 你好?\n"


@pytest.mark.parametrize("kind", ["unigram", "ignore_merges", "metaspace", "bytes"])
def test_users_cannot_spell_special_tokens(tmp_path, kind):
    """Not alone, not as a part of a word, and not by characters that normalization changes."""
    if kind == "unigram":
        train_unigram(tmp_path)
    elif kind == "metaspace":
        train_metaspace(tmp_path)
    else:
        train_byte_level(tmp_path)
    if kind == "ignore_merges":
        ignore_merges(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(QWEN_TEMPLATE)
    tokenizer = load_tokenizer(tmp_path)
    special = tokenizer.special_spellings
    for spelling in ("<|im_end|>", "<|im_start|>"):
        wide = spelling.replace("|", "｜").replace("<", "＜")
        for text in (spelling, f"a{spelling}b", f" {spelling} ", 2 * spelling, wide):
            ids = tokenizer.encode(text)
            assert "<|im_" not in "".join(special.get(token, "") for token in ids), text
            empty = tokenizer.encode_chat([{"role": "user", "content": ""}])
            chat = tokenizer.encode_chat([{"role": "user", "content": text}])
            for token in special:
                if special[token] != "<unk>":
                    assert chat.count(token) == empty.count(token), text
        (token,) = (token for token, known in special.items() if known == spelling)
        assert token in tokenizer.encode(spelling, special_tokens=True)


def test_training_lengths_in_a_file_are_ignored(tmp_path):
    """Some files truncate or pad every text to one length."""
    trained = train_byte_level(tmp_path)
    text = "Hello, world! How are you?"
    expected = trained.encode(text).ids
    trained.enable_truncation(2)
    trained.enable_padding(length=100)
    trained.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode(text) == expected


@pytest.mark.parametrize("spelled", ["<s>", {"content": "<s>", "lstrip": False}])
def test_beginning_token_comes_once(tmp_path, spelled):
    bos = train_byte_level(tmp_path, bos="<s>").token_to_id("<s>")
    config = {"bos_token": spelled, "chat_template": LLAMA_TEMPLATE}
    write_json(tmp_path / "tokenizer_config.json", config)
    tokenizer = load_tokenizer(tmp_path)
    for ids in (tokenizer.encode("ab"), tokenizer.encode_chat(MESSAGES)):
        assert ids[0] == bos
        assert ids.count(bos) == 1


def test_sentencepiece_beginning_token(tmp_path):
    train_sentencepiece(tmp_path)
    without = load_tokenizer(tmp_path).encode("Hello")
    write_json(tmp_path / "tokenizer_config.json", {"add_bos_token": True})
    (tmp_path / "chat_template.jinja").write_text(LLAMA_TEMPLATE)
    tokenizer = load_tokenizer(tmp_path)
    bos = tokenizer._model.bos_id()
    assert tokenizer.encode("Hello") == [bos, *without]
    assert tokenizer.encode_chat(MESSAGES).count(bos) == 1


def test_sentencepiece_ignores_ids_of_a_padded_vocabulary(tmp_path):
    train_sentencepiece(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode([*tokenizer.encode("Hello"), tokenizer.vocab_size + 5]) == "Hello"


def test_no_tokenizer(tmp_path):
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode([7, 300]) == "⟨7⟩⟨300⟩"
    assert stream(tokenizer, [7, 300]) == ["⟨7⟩", "⟨300⟩", ""]
    for use in (lambda: tokenizer.encode("a"), lambda: tokenizer.encode_chat(MESSAGES)):
        assert failure(use) == (
            f"{tmp_path}: no tokenizer (tokenizer.json, tokenizer.model or tiktoken.model); "
            "give prompts as prompt_ids"
        )


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        ("normalizer", {"type": "Replace", "pattern": {"String": ""}, "content": "x"}),
        ("pre_tokenizer", {"type": "FixedLength", "length": 0}),
        ("post_processor", {"type": "TemplateProcessing", "pair": [], "special_tokens": {},
                            "single": [{"SpecialToken": {"id": "X", "type_id": 0}}]}),
        ("model", {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                   "max_input_chars_per_word": 100, "vocab": {"a": 0}}),
    ],
    ids=["charsmap", "replace", "length", "template", "unknown"],
)  # fmt: skip
def test_damage_that_the_library_does_not_expect(tmp_path, part, value):
    """It panics, when it reads the file or with a text, which Python does not take for an error."""
    train_byte_level(tmp_path, specials=())
    path = tmp_path / "tokenizer.json"
    write_json(path, json.loads(path.read_text()) | {part: value})

    def use():
        tokenizer = load_tokenizer(tmp_path)
        tokenizer.encode("a b")
        tokenizer.encode_rendered("a b")

    assert failure(use).startswith(f"{path}: damaged (")


def test_damaged_sentencepiece_model(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"nonsense")
    assert failure(load_tokenizer, tmp_path) == (
        f"{tmp_path}/tokenizer.model: not a sentencepiece model, or damaged"
    )


@pytest.mark.parametrize("content", [b"[" * 100_000, b"\xff", b"{}"])
def test_tokenizer_files_that_no_parser_takes(tmp_path, content):
    train_byte_level(tmp_path)
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    if content != b"{}":
        message = failure(load_tokenizer, tmp_path)
        assert message.startswith(f"{tmp_path}/tokenizer_config.json: not ")
    (tmp_path / "tokenizer.json").write_bytes(content)
    message = failure(load_tokenizer, tmp_path)
    assert message.startswith(f"{tmp_path}/tokenizer.json: damaged (")


def test_ids_equal_those_of_transformers(tmp_path):
    _, transformers = import_transformers()
    train_byte_level(tmp_path, bos="<s>")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}
    config["chat_template"] = "{{ bos_token }}" + QWEN_TEMPLATE
    write_json(tmp_path / "tokenizer_config.json", config)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    for text in [*TEXTS, "a<|im_end|>b"]:
        assert ours.encode(text, special_tokens=True) == theirs(text)["input_ids"]
    chat = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert ours._template.render(MESSAGES) == chat
    for text in [*TEXTS, "<|im_ start|> <think>"]:
        messages = [*MESSAGES, {"role": "user", "content": text}]
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True)
        assert ours.encode_chat(messages) == list(expected["input_ids"])
