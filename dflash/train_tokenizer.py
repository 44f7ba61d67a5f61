"""Trains a tokenizer on the training splits of data sets.

    python -m dflash.train_tokenizer DESTINATION [--vocab_size=4096] [--datasets=math,code,chat]
        [--files=a.jsonl,b.jsonl] [--megabytes=8]

DESTINATION gets tokenizer.model (sentencepiece), tokenizer_config.json and chat_template.jinja: put
a model's config.json and weights beside them and it is a checkpoint. The same data give the same
bytes. Ids 0 to 6 are <unk>, <|pad|>, <|end|>, <|system|>, <|user|>, <|assistant|>, <|mask|>.
"""

import os
import pathlib
import sys
import time
from collections.abc import Sequence

from absl import flags

from dflash import cli, errors
from dflash.checkpoints.files import check_vacant
from dflash.config.data_schema import DataConfig
from dflash.data import datasets, tokenizer_training

USAGE = (
    "usage: python -m dflash.train_tokenizer DESTINATION [--vocab_size=N] [--datasets=A,B] "
    "[--files=A,B] [--megabytes=N]"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status: 0, or that of the error printed on stderr."""
    return cli.status_of(lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> None:
    values, positional = _parse(argv)
    if values.help:
        print(__doc__)
        return
    line = train_tokenizer(
        pathlib.Path(positional[0]),
        names=values.datasets,
        files=values.files,
        vocab_size=values.vocab_size,
        megabytes=values.megabytes,
    )
    print(line)


def train_tokenizer(
    destination: pathlib.Path,
    *,
    names: Sequence[str] = ("math", "code", "chat"),
    files: Sequence[str] = (),
    vocab_size: int = 4096,
    megabytes: float = 8.0,
) -> str:
    """Trains a tokenizer; `destination` appears whole or not at all.

    Args:
      destination: must not exist, or be empty.
      names: of data sets; "jsonl" comes along where there are files.
      files: of the data set jsonl.
      vocab_size: pieces.
      megabytes: of text, at most, from each data set.
    Returns:
      One line that says what was written.
    Raises:
      UserError: the data are unusable, or the destination cannot be written.
    """
    started = time.monotonic()
    check_vacant(destination)
    names = list(dict.fromkeys([*names, *(["jsonl"] if files else [])]))
    config = DataConfig(mixture=dict.fromkeys(names, 1.0), files=tuple(files))
    found = [datasets.find(name, config) for name in names]
    limit = int(megabytes * 1e6)
    sentences = [
        text
        for dataset in found
        for text in tokenizer_training.texts(dataset.examples("train"), limit)
    ]
    if not sentences:
        raise errors.InputError("no text to train on: name data sets or files")
    model = tokenizer_training.train(sentences, vocab_size=vocab_size)
    tokenizer_training.write(model, destination)
    return (
        f"{destination}: {vocab_size} pieces from {sum(map(len, sentences)) / 1e6:.1f} M "
        f"characters of {', '.join(names)}, in {time.monotonic() - started:.1f} s"
    )


def _parse(argv: Sequence[str]) -> tuple[flags.FlagValues, list[str]]:
    """Reads the command line.

    Raises:
      ConfigError: wrong usage.
    """
    values = flags.FlagValues()
    where = {"flag_values": values}
    flags.DEFINE_integer("vocab_size", 4096, "Pieces.", lower_bound=300, **where)
    flags.DEFINE_list("datasets", ["math", "code", "chat"], "Data sets to read.", **where)
    flags.DEFINE_list("files", [], "JSONL files to read.", **where)
    flags.DEFINE_float("megabytes", 8.0, "Of text, from each data set.", lower_bound=0, **where)
    return values, cli.parse_arguments(values, argv, ("DESTINATION",), USAGE)


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"  # nothing is computed on an accelerator
    sys.exit(main())
