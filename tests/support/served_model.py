"""Facts about a served model, without a server."""

import functools
import pathlib

import dflash
from dflash.config import schema
from dflash.serving.served_model import ServedModel, TokenNames
from dflash.text.grammar import Vocabulary
from dflash.text.tokenizer_loading import for_target

TARGET = pathlib.Path(dflash.__file__).parent / "assets" / "tiny_target"
END = 2  # <|end|>


@functools.cache
def tokenizer():
    return for_target(TARGET, thinking=False)


def make_model(**changes) -> ServedModel:
    """The facts about the tiny target."""
    words = tokenizer()
    facts = {
        "name": "tiny_target",
        "root": "assets/tiny_target",
        "drafter": "dflash",
        "tokenizer": words,
        "names": TokenNames(words),
        "vocabulary": lambda: Vocabulary.of(words),
        "decode": schema.DecodeConfig(max_new_tokens=50, top_k=3),
        "eos_ids": (END,),
        "vocab_size": words.vocab_size,
        "max_length": 256,
        "drafts": 15,
    }
    return ServedModel(**facts | changes)
