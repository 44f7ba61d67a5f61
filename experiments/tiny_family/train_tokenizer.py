"""Trains lossless sentencepiece tokenizers on the training splits of data sets.

python -m experiments.tiny_family train_tokenizer DESTINATION
"""

import io
import pathlib
import time
from collections.abc import Iterable, Iterator, Sequence

from absl import flags

from dflash import errors
from dflash.checkpoints.files import check_vacant, staged, write_json
from dflash.cli import preflight
from dflash.cli import subcommand as cli
from dflash.config.train_schema import DataConfig
from dflash.data import datasets
from dflash.data.example import Example
from dflash.storage import paths
from dflash.text.tokenizer import SENTENCEPIECE_MODEL

# Tokens 0 to 6, in this order. MASK is only read at the masked draft positions of a drafter.
UNKNOWN, PAD, END = "<unk>", "<|pad|>", "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
MASK = "<|mask|>"
NUM_INDENTS = 6
CHAT_TEMPLATE = """\
{#- The model was trained on single turns: earlier questions and answers are left out. -#}
{%- set last = namespace(question=0) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set last.question = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- if message.role not in ('system', 'user', 'assistant') -%}
{{- raise_exception('unknown role ' ~ message.role) -}}
{%- endif -%}
{%- if message.role == 'system' or loop.index0 >= last.question -%}
{{- '<|' ~ message.role ~ '|>' ~ message.content ~ '<|end|>' -}}
{%- endif -%}
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


def _define_flags(values: flags.FlagValues) -> None:
    where = {"flag_values": values}
    flags.DEFINE_integer("vocab_size", 4096, "Number of pieces.", lower_bound=300, **where)
    flags.DEFINE_list("datasets", [], "Data sets to read: a,b.", **where)
    flags.DEFINE_list("files", [], "JSONL files to read: a,b.", **where)
    flags.DEFINE_float(
        "megabytes", 8.0, "Maximum text of each data set, in MB.", lower_bound=0, **where
    )


SUBCOMMAND = cli.Subcommand(
    "train_tokenizer",
    "Trains a tokenizer on the training splits of data sets. DESTINATION gets tokenizer.model "
    "(sentencepiece), tokenizer_config.json and chat_template.jinja; with a model's config.json "
    "and weights it becomes a checkpoint. The same data give the same bytes. Ids 0 to 6 are <unk>, "
    "<|pad|>, <|end|>, <|system|>, <|user|>, <|assistant|>, <|mask|>.",
    examples=(
        "python -m experiments.tiny_family train_tokenizer w --files=mine.jsonl --vocab_size=8192",
    ),
    arguments=("DESTINATION",),
    define_flags=_define_flags,
    cpu_only=True,
)


def _train_tokenizer(command: cli.Command) -> None:
    options = dict(command.flags)
    names, (destination,) = options.pop("datasets"), command.arguments
    preflight.check_bucket(destination)
    check_vacant(paths.to_path(destination))
    preflight.check_writable(destination)
    for file in options["files"]:
        preflight.check_file(file)
    print(train_tokenizer(paths.to_path(destination), names=names, **options))


def train_tokenizer(
    destination: pathlib.Path,
    *,
    names: Sequence[str] = (),
    files: Sequence[str] = (),
    vocab_size: int = 4096,
    megabytes: float = 8.0,
) -> str:
    """Trains a tokenizer, and writes its directory completely or not at all.

    Args:
      destination: Directory to write; must be absent or empty.
      names: Names of data sets; "jsonl" is added if there are files.
      files: JSONL files of the data set jsonl.
      megabytes: Maximum amount of text from each data set, in MB.
    Returns:
      A summary in one line.
    Raises:
      UserError: The data are unusable, or the destination cannot be written.
    """
    started = time.monotonic()
    check_vacant(destination)
    names = list(dict.fromkeys([*names, *(["jsonl"] if files else [])]))
    config = DataConfig(mixture=dict.fromkeys(names, 1.0), files=tuple(files))
    sources = [datasets.find(name, config) for name in names]
    limit = int(megabytes * 1e6)
    sentences = [text for dataset in sources for text in texts(dataset.examples("train"), limit)]
    if not sentences:
        raise errors.InputError("no text to train on: name data sets or files")
    model = train(sentences, vocab_size=vocab_size)
    write(model, destination)
    return (
        f"{destination}: {vocab_size} pieces from {sum(map(len, sentences)) / 1e6:.1f} M "
        f"characters of {', '.join(names)}, in {time.monotonic() - started:.1f} s"
    )


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
    with staged(destination, SENTENCEPIECE_MODEL) as directory:
        (directory / SENTENCEPIECE_MODEL).write_bytes(model)
        write_json(directory / "tokenizer_config.json", TOKENIZER_CONFIG)
        (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


main = cli.entry_point(SUBCOMMAND, _train_tokenizer)
