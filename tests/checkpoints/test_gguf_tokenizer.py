"""Tokenizers in GGUF files encode as the ones that they were made from."""

import datetime
import json

import hypothesis
import hypothesis.strategies as st
import pytest
import sentencepiece
from support import failure, gguf_files
from support.trained_tokenizers import LLAMA_TEMPLATE, QWEN_TEMPLATE, TEXTS, train_sentencepiece

from dflash.checkpoints.gguf import tokenizer_files
from dflash.checkpoints.gguf.file_header import GgufHeader
from dflash.text.tokenizer_loading import load_tokenizer

tokenizers = pytest.importorskip("tokenizers", reason="pip install 'dflash-jax[hf]'")

TODAY = datetime.date(2026, 1, 1)
SPECIALS = ("<|im_start|>", "<|im_end|>", "<s>")
# Regular expressions and options of the tokenizer.json of each model, from its repository.
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"\p{N}| ?", r"\p{N}{1,3}| ?")
common = st.sampled_from("aAéß 0123456789'stre.,!\n\r\t½你🦜<|im_>e\u0301")
texts = st.text(common | st.characters(exclude_categories=["Cs"]))


def train(pre):
    """A byte-level tokenizer with the pre-tokenizer of a model."""
    parts = tokenizers.pre_tokenizers
    bpe = tokenizers.models.BPE(ignore_merges=pre == "llama-bpe")
    tokenizer = tokenizers.Tokenizer(bpe)
    bytes_only = parts.ByteLevel(add_prefix_space=False, use_regex=False)
    with_words = parts.ByteLevel(add_prefix_space=False)

    def split(pattern):
        return parts.Split(tokenizers.Regex(pattern), "isolated")

    tokenizer.pre_tokenizer = {
        "gpt-2": lambda: with_words,
        "smollm": lambda: parts.Sequence([parts.Digits(individual_digits=True), with_words]),
        "qwen2": lambda: parts.Sequence([split(QWEN2), bytes_only]),
        "llama-bpe": lambda: parts.Sequence([split(LLAMA3), bytes_only]),
    }[pre]()
    if pre == "qwen2":
        tokenizer.normalizer = tokenizers.normalizers.NFC()
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=list(SPECIALS),
        initial_alphabet=parts.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*TEXTS, "it's 1234567 and 12 you're 99"] * 20, trainer)
    return tokenizer


def byte_level_values(tokenizer, pre):
    """Metadata as llama.cpp's converter writes them."""
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIALS else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": tokens.index("<s>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.chat_template": QWEN_TEMPLATE,
    }


def unpack(directory, values):
    """The tokenizer that the metadata describe."""
    header = GgufHeader(directory / "m.gguf", values, {})
    for name, content in tokenizer_files.of_file(header).files().items():
        (directory / name).write_bytes(content)
    return load_tokenizer(directory, date=TODAY)


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("qwen35", "a\u0902b I'm 123", ["a\u0902b", " I", "'m", " ", "1", "2", "3"]),
        ("gpt-4o", "HTTPServer I'm 1234/\n", ["HTTPServer", " I'm", " ", "123", "4", "/\n"]),
        ("smaug-bpe", "HTTPServer I'm 1234", ["HTTPServer", " I", "'m", " ", "123", "4"]),
        ("tekken", "HTTPServer I'm 12/\n", ["HTTPServer", " I", "'m", " ", "1", "2", "/\n"]),
        ("falcon3", "I'm 1234", ["I", "'m", " ", "123", "4"]),
        ("deepseek-coder", "a, 12.\n b字", ["a", ",", " ", "1", "2", ".", "\n", " b", "字"]),
        ("deepseek-llm", "a, 12.\n b字", ["a", ",", " ", "12", ".", "\n", " b", "字"]),
    ],
)
def test_words_of_a_family(tmp_path, pre, text, words):
    values = byte_level_values(train("gpt-2"), "gpt-2") | {"tokenizer.ggml.pre": pre}
    unpack(tmp_path, values)
    splits = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).pre_tokenizer
    assert [text[slice(*place)] for _, place in splits.pre_tokenize_str(text)] == words


def test_gemma_4_spells_its_tokens(tmp_path):
    tokens = ["<unk>", "<bos>", "▁", "a", "▁a", "\n", "\n\n", *(f"<0x{i:02X}>" for i in range(256))]
    values = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 1, 1, 1, 1, 1, *[6] * 256],
        "tokenizer.ggml.merges": ["▁ a", "\n \n"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.add_bos_token": False,  # Some files say so; llama.cpp adds it nevertheless.
    }
    tokenizer = unpack(tmp_path, values)
    text = "a a\n\n\n é"
    expected = ["<bos>", "a", "▁a", "\n\n", "\n", "▁", "<0xC3>", "<0xA9>"]
    ids = tokenizer.encode(text)
    assert [tokens[token] for token in ids] == expected
    assert tokenizer.decode(ids) == text
    assert b"".join(tokenizer.token_bytes().tokens[token] for token in ids[1:]) == text.encode()


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Each kind: what it was made from, and what we read."""
    made = {}
    for pre in ("gpt-2", "smollm", "qwen2", "llama-bpe"):
        tokenizer = train(pre)
        directory = tmp_path_factory.mktemp(pre)
        made[pre] = tokenizer, unpack(directory, byte_level_values(tokenizer, pre))
    return made


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "qwen2", "llama-bpe"])
@hypothesis.given(text=texts | st.sampled_from(TEXTS))
def test_byte_level(pairs, pre, text):
    original, ours = pairs[pre]
    expected = original.encode(text).ids
    assert ours.encode(text, special_tokens=True, add_special_tokens=False) == expected
    assert ours.decode(expected) == original.decode(expected)


def test_the_chat_template_and_special_tokens(pairs):
    original, ours = pairs["smollm"]
    rendered = ours.render_chat([{"role": "user", "content": "Say <|im_end|> 12"}])
    ids = ours.encode_rendered(rendered)
    assert ids.count(original.token_to_id("<|im_end|>")) == 1  # the user's is plain text
    assert ids[0] == original.token_to_id("<|im_start|>")
    assert ours.decode(ids).startswith("user\nSay <|im_end|> 12\nassistant")


@pytest.mark.parametrize(
    ("pre", "stated", "added"),
    [("gpt-2", None, 0), ("gpt-2", True, 1), ("llama-bpe", None, 1), ("llama-bpe", False, 0)],
)
def test_the_beginning_of_sequence(tmp_path, pre, stated, added):
    original = train(pre)
    values = byte_level_values(original, pre)
    if stated is not None:
        values["tokenizer.ggml.add_bos_token"] = stated
    bos = [original.token_to_id("<s>")] * added
    assert unpack(tmp_path, values).encode("Hello") == bos + original.encode("Hello").ids


@pytest.fixture(scope="module")
def sentencepieces(tmp_path_factory):
    made = {}
    for prefixed in (False, True):
        directory = tmp_path_factory.mktemp("sentencepiece")
        train_sentencepiece(directory, add_dummy_prefix=prefixed)
        file = str(directory / "tokenizer.model")
        model = sentencepiece.SentencePieceProcessor(model_file=file)
        template = {"tokenizer.chat_template": LLAMA_TEMPLATE}
        values = gguf_files.sentencepiece_values(model) | template
        ours = tmp_path_factory.mktemp("ours")
        space = {"tokenizer.ggml.add_space_prefix": prefixed}
        template = {"chat_template": LLAMA_TEMPLATE, "bos_token": "<s>", "add_bos_token": True}
        (directory / "tokenizer_config.json").write_text(json.dumps(template))
        made[prefixed] = load_tokenizer(directory, date=TODAY), unpack(ours, values | space)
    return made


@pytest.mark.parametrize("prefixed", [False, True])
@hypothesis.given(text=texts | st.sampled_from(TEXTS))
def test_sentencepiece(sentencepieces, prefixed, text):
    original, ours = sentencepieces[prefixed]
    ids = original.encode(text)
    assert ours.encode(text) == ids
    assert ours.decode(ids) == original.decode(ids)


@pytest.mark.parametrize(
    ("unknown", "padding", "ids"),
    [
        pytest.param(3, 5, {"unknown": 0}, id="control"),
        pytest.param(3, 5, {}, id="control, of no key"),
        pytest.param(2, 2, {}, id="one of several"),
        pytest.param(2, 2, {"unknown": 0, "bos": None, "eos": None}, id="no other key"),
    ],
)
def test_the_unknown_token_of_sentencepiece(tmp_path, unknown, padding, ids):
    """Converters give it several types; without keys, llama.cpp takes ids 0, 1 and 2."""
    train_sentencepiece(tmp_path)
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    values = gguf_files.sentencepiece_values(model) | {"tokenizer.ggml.add_space_prefix": False}
    values |= {f"tokenizer.ggml.{name}_token_id": token for name, token in ids.items()}
    if "unknown" not in ids:
        del values["tokenizer.ggml.unknown_token_id"]
    values["tokenizer.ggml.token_type"] = [
        unknown, *values["tokenizer.ggml.token_type"][1:], padding
    ]  # fmt: skip
    values["tokenizer.ggml.tokens"] = [*values["tokenizer.ggml.tokens"], "[PAD9]"]
    values["tokenizer.ggml.scores"] = [*values["tokenizer.ggml.scores"], -9.0]
    tokenizer = unpack(tmp_path, values)
    for text in TEXTS:
        assert tokenizer.encode(text) == [1, *model.encode(text)]
    ends = tokenizer_files.of_file(GgufHeader("x", values, {})).end_ids()
    assert ends == (2, 5), "</s> and <|im_end|>"
    hidden = [2] if padding == 5 else [2, model.vocab_size()]
    assert tokenizer.decode([*model.encode("a"), *hidden]) == "a"


@pytest.mark.parametrize(
    ("control", "normal", "ends"),
    [
        pytest.param("<eos> <end_of_turn>", "a", "<eos> <end_of_turn>", id="gemma"),
        pytest.param("<|eot_id|> <|eom_id|> <|x|>", "", "<|eot_id|> <|eom_id|>", id="llama"),
        pytest.param("<|return|> <|call|> <|end|>", "", "<|return|> <|call|>", id="gpt-oss"),
        pytest.param("<|flush|> <|calls|> <|end|>", "", "<|flush|> <|calls|>", id="solar"),
        pytest.param("<|call|> <|end|>", "", "<|call|> <|end|>", id="no return"),
        pytest.param("<eos> <|file_sep|>", "[EOT]", "<eos> <|file_sep|> [EOT]", id="code"),
        pytest.param("<eos>", "</s>", "<eos>", id="html"),
        pytest.param("<eos> </s>", "", "<eos> </s>", id="control"),
    ],
)  # fmt: skip
def test_ends_of_an_answer_are_known_by_their_spelling(control, normal, ends):
    """As llama.cpp's list has it, whatever the file states; `</s>` may be a tag of HTML."""
    tokens = [*control.split(), *normal.split()]
    types = [3] * len(control.split()) + [1] * len(normal.split())
    values = {"tokens": tokens, "token_type": types, "eos_token_id": 0}
    header = GgufHeader("x", {f"tokenizer.ggml.{key}": value for key, value in values.items()}, {})
    assert [tokens[token] for token in tokenizer_files.of_file(header).end_ids()] == ends.split()


def test_an_end_is_a_control_token_whatever_its_type(tmp_path):
    values = byte_level_values(train("gpt-2"), "gpt-2")
    end = values["tokenizer.ggml.tokens"].index("<|im_end|>")
    for kind in (1, 2, 4):
        values["tokenizer.ggml.token_type"][end] = kind
        tokenizer = unpack(tmp_path, values)
        assert end not in tokenizer.encode("a<|im_end|>")
        assert tokenizer.decode([*tokenizer.encode("a"), end]) == "a"


def test_named_chat_templates(tmp_path):
    named = {"tokenizer.chat_template.tool_use": "T", "tokenizer.chat_templates": ["tool_use"]}
    tokenizer = unpack(tmp_path, byte_level_values(train("gpt-2"), "gpt-2") | named)
    messages = [{"role": "user", "content": "Hi"}]
    assert tokenizer.render_chat(messages, tools=[{}]) == "T"
    assert tokenizer.render_chat(messages).startswith("<|im_start|>")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model: 'bert' is not supported, only gpt2, llama"),
        ({"pre": "viking"}, "tokenizer.ggml.pre: 'viking' is not supported, only gpt-2, smollm"),
        ({"pre": None}, "lacks tokenizer.ggml.pre, without which texts cannot be split into words"),
        ({"token_type": [1]}, "tokenizer.ggml.tokens and token_type do not fit, which is not"),
        ({"bos_token_id": 999}, "tokenizer.ggml.bos_token_id is 999 of 360 tokens, which is not"),
        ({"merges": ["a"]}, "tokenizer.ggml.merges: merge 0 is no pair of tokens that form a"),
        ({"merges": None}, "the metadata lacks tokenizer.ggml.merges"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, change, message):
    values = byte_level_values(train("gpt-2"), "gpt-2")
    values |= {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    assert message in failure(unpack, tmp_path, values)
