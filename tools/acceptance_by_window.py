"""Measures how many drafts are accepted after long contexts, if the drafter sees a part of them.

    python tools/acceptance_by_window.py configs/smollm2_135m_dflash.yml \
        --files docs/decoding.md docs/serving.md --contexts 1024 4096 --windows 256 1024

Each prompt is the beginning of a file, of about as many tokens as the context, and a question about
it. The target answers greedily, and the drafter's cycles are replayed on the answers through each
window. Prints the mean acceptance length (τ), and one JSON line for each context.
"""

import argparse
import dataclasses
import json
import pathlib

from dflash.config import loader, schema
from dflash.config.schema import PromptsConfig
from dflash.loading import job as jobs
from dflash.loading.job import Job
from dflash.measure.pair import alternatives, diagnosis
from dflash.measure.pair.diagnosis import Acceptance

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
        shown = "  ".join(f"{name} {one.tau:.3f}" for name, one in found.items())
        cycles = {name: dict(one.cycles) for name, one in found.items()}
        print(f"context {context}: {shown}", flush=True)
        print(json.dumps({"context": context, "cycles": cycles}), flush=True)


def by_window(
    job: Job, documents: list[str], context: int, windows: list[int]
) -> dict[str, Acceptance]:
    """Returns what the drafter's cycles commit through each window, and without one.

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
    decoded = diagnosis.measure(engine, examined)
    others = list(alternatives.of_windows(examined.drafter.shape, windows))
    readings = diagnosis.read_all(engine, examined, decoded, others)
    narrowed = {one.alternative.change: one.acceptance for one in readings}
    return {"all": decoded.acceptance, **narrowed}


if __name__ == "__main__":
    main()
