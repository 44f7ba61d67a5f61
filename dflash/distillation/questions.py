"""Description of a distillation's questions for its plan, with one as the target reads it."""

from collections.abc import Iterator

from dflash import errors
from dflash.config.distill_schema import DistillRun
from dflash.config.schema import PromptsConfig
from dflash.loading import models
from dflash.loading.job import Job
from dflash.text import jsonl, prompts

_SHOWN_CHARACTERS = 1000


def describe(config: DistillRun, job: Job) -> Iterator[str]:
    """Yields the sources of the questions, how texts are formatted, and one rendered prompt.

    Args:
      job: Decode job of the answers, without prompts.
    Raises:
      ConfigError: Texts are to go through a chat template that the checkpoint lacks.
      InputError: A file cannot be read.
    """
    answers = config.answers
    if answers.made is not None:
        yield f"  answered already, in {answers.made}"
        return
    for file in answers.files:
        yield from _file(file)
    downloaded = job.target_source.directory or config.target.checkpoint == models.RANDOM
    yield f"  {_format(config, job) if downloaded else 'format unknown without the checkpoint'}"
    if downloaded:
        yield from _example(config, job)


def _file(file: str) -> Iterator[str]:
    """Yields the number of lines of a file, and of the reference answers that are dropped."""
    lines = answered = 0
    for _, read in jsonl.entries(file):
        lines += 1
        try:
            answered += prompts.ends_with_answer(read())
        except errors.InputError:
            continue  # The stage that needs the line reports it.
    yield f"  {file}: {lines:,} line{'' if lines == 1 else 's'}"
    if answered:
        yield f"    {answered:,} end with a reference answer, which is dropped"


def _format(config: DistillRun, job: Job) -> str:
    if prompts.in_chat(config.answers.chat, job.tokenizer):
        if not job.tokenizer.has_chat_template:
            raise errors.ConfigError(
                f"answers.chat: true, but {config.target.checkpoint} has no chat template; "
                "answers.chat=false decodes texts as they are"
            )
        return "texts go through the chat template (answers.chat=false turns it off)"
    if config.answers.chat is None:
        return "texts are decoded as they are, since the checkpoint has no chat template"
    return "texts are decoded as they are, without the chat template (answers.chat=false)"


def _example(config: DistillRun, job: Job) -> Iterator[str]:
    """Yields the first question as the target reads it, special tokens included."""
    vocab_size = job.target.arch.vocab_size
    source = PromptsConfig(file=config.answers.files[0], chat=config.answers.chat)
    first = prompts.read_first(source, job.tokenizer, vocab_size=vocab_size)
    if first is None:
        return
    text = job.tokenizer.decode(first.ids, special_tokens=True)
    shown = text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"
    yield "  the first one, as the target reads it:"
    for line in shown.splitlines():
        yield f"    | {line}"
