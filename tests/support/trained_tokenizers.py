"""Tokenizers of every kind, trained on the spot, and chat templates, for tests that need them."""

import functools
import io
import json

import pytest

import support
from dflash import errors

TEXTS = [
    "Hello, world! How are you?",
    "naïve café — 你好，世界 🦜🚀 ½ ﷽",
    "  two  spaces\n\ttabs\r\nend ",
    "👩‍👩‍👧 family; combining: e\u0301",
]
# The essentials of Qwen3's template: roles between special tokens, then an opened answer.
QWEN_TEMPLATE = """\
{%- for message in messages %}
{%- if loop.first and message.role == 'tool' %}
{{- raise_exception('Conversations start with a user.') }}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA_TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 < 3 & 你好?"},
]


def write_json(path, content):
    path.write_text(json.dumps(content), encoding="utf-8")


def _library():
    return pytest.importorskip("tokenizers", reason="pip install 'dflash-jax[hf]'")


def _saved(tokenizer, directory):
    tokenizer.save(str(directory / "tokenizer.json"))
    return tokenizer


def train_byte_level(directory, *, bos=None, specials=("<|im_start|>", "<|im_end|>")):
    """Byte-level BPE as Qwen and Llama 3 have it; `bos` is put before every text."""
    tokenizers = _library()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[*specials, *([bos] if bos else [])],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    if bos:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return _saved(tokenizer, directory)


def train_byte_fallback(directory):
    """BPE with ▁ for spaces and byte tokens for rare characters, as Llama 2's tokenizer.json."""
    tokenizers = _library()
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    for piece in ["▁", *"Helowrd!,H"]:
        vocab.setdefault(piece, len(vocab))
    model = tokenizers.models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    normalizers, decoders = tokenizers.normalizers, tokenizers.decoders
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    tokenizer.save(str(directory / "tokenizer.json"))


def train_metaspace(directory, scheme="first"):
    """BPE with ▁ for spaces, put before the first text only, as newer conversions of Llama 2."""
    tokenizers = _library()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>"))
    space = tokenizers.pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.pre_tokenizer = space
    tokenizer.decoder = tokenizers.decoders.Metaspace(prepend_scheme=scheme, split=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=200,
        special_tokens=["<unk>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=list("▁<|im_end>start"),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return _saved(tokenizer, directory)


def train_unigram(directory):
    """Unigram model whose pieces include the special tokens, as T5's and XLM-R's."""
    tokenizers = _library()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram())
    tokenizer.normalizer = tokenizers.normalizers.NFKC()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    trainer = tokenizers.trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<unk>", "<|im_start|>", "<|im_end|>"], unk_token="<unk>",
        initial_alphabet=list("<|im_end>start"), show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(TEXTS, trainer)
    return _saved(tokenizer, directory)


def ignore_merges(directory):
    """Makes a byte-level tokenizer look up whole words first, special tokens among them."""
    content = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    content["model"]["ignore_merges"] = True
    content["pre_tokenizer"]["use_regex"] = False
    write_json(directory / "tokenizer.json", content)


def train_sentencepiece(directory, **options):
    import sentencepiece

    model = io.BytesIO()
    kept = {"remove_extra_whitespaces": False, "add_dummy_prefix": False, "model_type": "bpe"}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*TEXTS[:1] * 200, *TEXTS]),
        model_writer=model,
        vocab_size=300,
        hard_vocab_limit=False,
        byte_fallback=True,
        character_coverage=0.98,
        pad_id=3,
        control_symbols=["<|im_start|>", "<|im_end|>"],
        normalization_rule_name="identity",
        minloglevel=2,
        **kept | options,
    )
    (directory / "tokenizer.model").write_bytes(model.getvalue())


failure = functools.partial(support.failure, kind=errors.InputError)
