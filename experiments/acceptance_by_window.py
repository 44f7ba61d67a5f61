"""Measures how many drafts are accepted after long contexts, if the drafter sees a part of them.

    python experiments/acceptance_by_window.py configs/smollm2_135m_dflash.yml \
        --files docs/decoding.md docs/serving.md --contexts 1024 4096 --windows 256 1024

Each prompt is the beginning of a file, of about as many tokens as the context, and a question about
it. The target answers greedily, and a draft is made at every token of the answers, through each
window. From these follows what the cycles of a drafter with each window commit. Prints the mean
acceptance length (τ) of each, and if the best window of each text is known, and one JSON line for
each context.
"""

import argparse
import dataclasses
import json
import pathlib
from collections import Counter
from collections.abc import Iterable

import numpy as np

from dflash.config import loader, schema
from dflash.config.schema import PromptsConfig
from dflash.inference import replay
from dflash.loading import job as jobs
from dflash.loading.job import Job
from dflash.measure.pair import alternatives, diagnosis
from dflash.measure.pair.diagnosis import Acceptance
from dflash.text.tokenizer import Tokenizer

QUESTION = (
    "\n\nWhat is this text about? Explain it in your own words, with its most important terms."
)


@dataclasses.dataclass(frozen=True)
class Drafts:
    """Drafts at every token of an answer.

    Attributes:
      prompt: Tokens of the prompt.
      committed: Tokens that a cycle would commit, int [W, tokens], by window, the whole context
        last; 0 past the end of the answer.
      num_drafts: Drafts of each cycle.
    """

    prompt: int
    committed: np.ndarray
    num_drafts: int


def main() -> None:
    """Prints a table of windows, context by context."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("config", help="config of decoding")
    parser.add_argument("overrides", nargs="*", help="key=value")
    parser.add_argument("--files", nargs="+", required=True, type=pathlib.Path)
    parser.add_argument("--contexts", nargs="+", type=int, required=True)
    parser.add_argument("--windows", nargs="+", type=int, required=True)
    args = parser.parse_args()
    config = loader.load(args.config, args.overrides, schema.DecodeRun)
    job = jobs.prepare_models(dataclasses.replace(config, prompts=PromptsConfig()))
    job.load_weights()
    documents = [path.read_text(encoding="utf-8") for path in args.files]
    windows = tuple(sorted(args.windows))
    for context in args.contexts:
        texts = draft_everywhere(job, documents, context, windows)
        names = [*map(str, windows), "all"]
        found = {name: [through(text, i) for text in texts] for i, name in enumerate(names)}
        best = [max(some, key=lambda one: one.tau) for some in zip(*found.values(), strict=True)]
        shown = "  ".join(f"{name} {together(some).tau:.3f}" for name, some in found.items())
        print(f"context {context}: {shown}  best of each text {together(best).tau:.3f}", flush=True)
        taus = {name: [round(one.tau, 3) for one in found[name]] for name in names}
        print(json.dumps({"context": context, "tau by text": taus}), flush=True)


def question_after(tokenizer: Tokenizer, text: str, context: int) -> str:
    """Returns the first `context` tokens of a text, or all, and a question about them."""
    return tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)[:context]) + QUESTION


def together(some: Iterable[Acceptance]) -> Acceptance:
    """Returns the acceptance over the cycles of all texts."""
    return Acceptance(sum((one.cycles for one in some), Counter()))


def through(text: Drafts, window: int) -> Acceptance:
    """Returns what cycles commit through the window with this index."""
    lengths, position = [], 0
    while count := int(text.committed[window, position]):
        lengths.append(count)
        position += count
    return Acceptance(Counter(lengths))


def draft_everywhere(
    job: Job, documents: list[str], context: int, windows: tuple[int, ...]
) -> list[Drafts]:
    """Returns drafts at every token of the answers, through each window and without one.

    Args:
      job: Job with loaded weights.
      documents: Texts of at least `context` tokens.
      context: Tokens of each prompt, without its question.
      windows: Windows, ascending.
    """
    texts = tuple(question_after(job.tokenizer, text, context) for text in documents)
    prompts = PromptsConfig(text=texts, chat=True)
    examined = diagnosis.prepare(
        dataclasses.replace(job, config=dataclasses.replace(job.config, prompts=prompts))
    )
    examined.load_drafter()
    engine = diagnosis.compiled_engine(examined, [], lambda ready, total: None)
    decoded, drafter = diagnosis.measure(engine, examined), examined.drafter
    texts = replay.compute(job.target, decoded.texts, drafter.feature_layers)
    narrowed = alternatives.of_windows(drafter.shape, windows)
    drafters = [*(diagnosis.read_as(drafter, one) for one in narrowed), drafter]
    cycles = [replay.cycles(one, job.target, texts, everywhere=True) for one in drafters]
    committed = np.stack([one.committed for one in cycles], axis=1)
    count = drafter.num_draft_tokens
    return [Drafts(int(p), c, count) for p, c in zip(texts.prompt, committed, strict=True)]


if __name__ == "__main__":
    main()
