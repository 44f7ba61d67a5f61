"""Training of lossless sentencepiece tokenizers, and their files."""

import io
import pathlib
from collections.abc import Iterable, Iterator

from dflash import errors
from dflash.checkpoints import files
from dflash.data.example import Example
from dflash.text.tokenizer import SENTENCEPIECE_MODEL

# Tokens 0 to 6, in this order. MASK is only read at the masked draft positions of a drafter.
UNKNOWN, PAD, END = "<unk>", "<|pad|>", "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
MASK = "<|mask|>"
NUM_INDENTS = 6
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role not in ('system', 'user', 'assistant') -%}
{{- raise_exception('unknown role ' ~ message.role) -}}
{%- endif -%}
{{- '<|' ~ message.role ~ '|>' ~ message.content ~ '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""
TOKENIZER_CONFIG = {
    "tokenizer_class": "LlamaTokenizer",
    "add_bos_token": False,
    "add_eos_token": False,
    "eos_token": END,
    "pad_token": PAD,
    "unk_token": UNKNOWN,
    "legacy": False,
    "clean_up_tokenization_spaces": False,
}


def texts(examples: Iterable[Example], max_characters: int) -> Iterator[str]:
    """Yields the messages of examples until there are enough characters."""
    total = 0
    for example in examples:
        for message in example.messages:
            text = message["content"] or ""
            yield text
            total += len(text)
        if total >= max_characters:
            return


def train(sentences: Iterable[str], *, vocab_size: int, num_threads: int = 1) -> bytes:
    """Trains a byte-pair tokenizer; equal sentences give equal bytes.

    Spaces are ordinary characters, each digit is a token of its own, a line break and the
    indentation after it form one token, and characters outside the vocabulary fall back to bytes.

    Args:
      sentences: Texts; no token spans two of them.
      vocab_size: Number of tokens, including the special ones and the 256 bytes.
    """
    import sentencepiece

    model = io.BytesIO()
    # U+2581 is sentencepiece's symbol for a space.
    indents = ["\n" + "\u2581" * (4 * depth) for depth in range(NUM_INDENTS)]
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            num_threads=num_threads,
            minloglevel=2,
            # Keep every character, so that encoding is lossless.
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            byte_fallback=True,
            character_coverage=0.9998,
            max_sentence_length=2**20,
            split_digits=True,
            user_defined_symbols=[*indents, "\n\n"],
            unk_piece=UNKNOWN,
            pad_id=1,
            pad_piece=PAD,
            eos_id=2,
            eos_piece=END,
            bos_id=-1,
            control_symbols=[*ROLES, MASK],
        )
    except (RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())
        raise errors.InputError(f"vocab_size={vocab_size}: {reason}") from error
    return model.getvalue()


def write(model: bytes, destination: pathlib.Path) -> None:
    """Writes tokenizer.model, tokenizer_config.json and chat_template.jinja."""
    with files.staged(destination, SENTENCEPIECE_MODEL) as directory:
        (directory / SENTENCEPIECE_MODEL).write_bytes(model)
        files.write_json(directory / "tokenizer_config.json", TOKENIZER_CONFIG)
        (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
