"""Trains a tokenizer on the training splits of data sets: dflash train_tokenizer DESTINATION."""

import pathlib
import time
from collections.abc import Sequence

from absl import flags

from dflash import errors
from dflash.checkpoints.files import check_vacant
from dflash.cli import preflight
from dflash.cli import subcommand as cli
from dflash.config.train_schema import DataConfig
from dflash.data import datasets, tokenizer_training
from dflash.storage import paths


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
    examples=("dflash train_tokenizer w --files=mine.jsonl --vocab_size=8192",),
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
    sentences = [
        text
        for dataset in sources
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


main = cli.entry_point(SUBCOMMAND, _train_tokenizer)

if __name__ == "__main__":
    main()
