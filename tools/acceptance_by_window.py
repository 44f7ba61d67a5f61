"""Measures how many drafts are accepted after long contexts, if the drafter sees a part of them.

    python tools/acceptance_by_window.py configs/smollm2_135m_dflash.yml \
        --files docs/decoding.md docs/serving.md --contexts 1024 4096 --windows 256 1024

Each prompt is the beginning of a file, of about as many tokens as the context, and a question about
it. The target answers greedily, and the drafter's cycles are replayed on the answers through each
window. Prints the mean acceptance length (τ) through each window, and if the best window of each
text is known, and one JSON line for each context.
"""

import argparse
import dataclasses
import json
import pathlib
from collections import Counter
from collections.abc import Iterable

import jax

from dflash.config import loader, schema
from dflash.config.schema import PromptsConfig
from dflash.drafters.base import Drafter
from dflash.loading import job as jobs
from dflash.loading.job import Job
from dflash.measure.pair import alternatives, diagnosis, replay
from dflash.measure.pair.diagnosis import Acceptance
from dflash.measure.pair.replay import Texts

QUESTION = (
    "\n\nWhat is this text about? Explain it in your own words, with its most important terms."
)


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
    for context in args.contexts:
        found = by_window(job, documents, context, args.windows)
        shown = "  ".join(f"{name} {together(some).tau:.3f}" for name, some in found.items())
        best = [max(some, key=lambda one: one.tau) for some in zip(*found.values(), strict=True)]
        print(f"context {context}: {shown}  best of each text {together(best).tau:.3f}", flush=True)
        taus = {name: [round(one.tau, 3) for one in some] for name, some in found.items()}
        print(json.dumps({"context": context, "tau by text": taus}), flush=True)


def together(some: Iterable[Acceptance]) -> Acceptance:
    """Returns the acceptance over the cycles of all texts."""
    return Acceptance(sum((one.cycles for one in some), Counter()))


def by_window(
    job: Job, documents: list[str], context: int, windows: list[int]
) -> dict[str, list[Acceptance]]:
    """Returns what the drafter's cycles commit on each text through each window, and without one.

    Args:
      job: Job with loaded weights.
      documents: Texts of at least `context` tokens.
      context: Tokens of each prompt, without its question.
      windows: Windows to try.
    """
    beginnings = [
        job.tokenizer.decode(job.tokenizer.encode(text, add_special_tokens=False)[:context])
        for text in documents
    ]
    prompts = PromptsConfig(text=tuple(text + QUESTION for text in beginnings), chat=True)
    examined = diagnosis.prepare(
        dataclasses.replace(job, config=dataclasses.replace(job.config, prompts=prompts))
    )
    examined.load_drafter()
    engine = diagnosis.compiled_engine(examined, [], lambda ready, total: None)
    decoded, drafter = diagnosis.measure(engine, examined), examined.drafter
    texts = replay.compute(job.target, decoded.texts, drafter.feature_layers)
    drafters = {"all": drafter} | {
        one.change: diagnosis.read_as(drafter, one)
        for one in alternatives.of_windows(drafter.shape, windows)
    }
    return {name: _by_text(one, job, texts) for name, one in drafters.items()}


def _by_text(drafter: Drafter, job: Job, texts: Texts) -> list[Acceptance]:
    cycles = replay.cycles(drafter, job.target, texts)
    each = (jax.tree.map(lambda x, i=i: x[i], cycles) for i in range(len(cycles.committed)))
    return [Acceptance(one.counts) for one in each]


if __name__ == "__main__":
    main()
