"""`decode.exact`: a token's bits do not depend on what was drafted, in the arithmetic of XLA.

The kernels of a single CPU are exact by themselves, so these tests run on a mesh of two, whose
products and sums are XLA's, as on other devices. The probabilities of the tokens are compared bit
for bit, since equal tokens may hide unequal logits.
"""

import dataclasses

import pytest

from dflash import errors
from dflash.config import loader
from dflash.config.benchmark_schema import BenchmarkRun
from dflash.config.schema import DecodeRun
from dflash.inference.request import Tokens
from dflash.loading import job as jobs
from dflash.offline.decoding import decode

COMMON = (
    *("dtype=bfloat16", "mesh.tensor=2", "decode.exact=true", "decode.max_new_tokens=24"),
    *("prompts.text=[]", "prompts.dataset=math", "prompts.limit=4", "decode.sync_every=4"),
    "decode.prefill_chunk=32",  # One program serves prompts of all lengths.
)
DFLASH2 = "configs/tiny_dflash2.yml"


def prepare(config: str, *overrides: str) -> jobs.Job:
    return jobs.prepare(loader.load(config, [*COMMON, *overrides], DecodeRun), stdin=None)


def outputs(job: jobs.Job) -> dict[int, list]:
    """Tokens of every prompt with their log-probabilities."""
    requests = [dataclasses.replace(each, logprobs=0) for each in job.requests(job.prompts)]
    found = {request.id: [] for request in requests}
    for event in decode(job.engine(), requests):
        if isinstance(event, Tokens):
            scores = (each.logprob for each in event.logprobs)
            found[event.id] += zip(event.ids, scores, strict=True)
    return found


@pytest.mark.parametrize(
    ("config", "overrides"),
    [
        (DFLASH2, ("decode.batch_size=3", "decode.temperature=0.8")),
        (DFLASH2, ("decode.kv_dtype=int8", "target.quantization=int8")),
        (DFLASH2, ("drafter.block_size=auto", "decode.batch_size=4")),
        ("configs/tiny_eagle3.yml", ("decode.batch_size=2",)),
    ],
)
def test_drafting_changes_no_bit(config, overrides):
    job = prepare(config, *overrides)
    job.load_weights()
    drafted = outputs(job)
    assert drafted == outputs(job.without_drafting())
    assert all(len(tokens) > 4 for tokens in drafted.values())


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("drafter.tree.budget=8", "decode.exact: for chains.*leave the tree out"),
        ("decode.verify=rejection", "needs coupled"),
        ("decode.prefix_cache=true", "decode.prefix_cache: changes"),
        ("decode.num_pages=64", "decode.num_pages: preempted"),
    ],
)
def test_what_would_break_it_is_refused(override, said):
    with pytest.raises(errors.ConfigError, match=said):
        prepare(DFLASH2, override)


@pytest.mark.parametrize(
    "override", ["decode.verify=rejection", "decode.num_pages=64", "decode.prefix_cache=true"]
)
def test_benchmarks_refuse_the_same_settings(override):
    with pytest.raises(errors.ConfigError, match=override.partition("=")[0]):
        loader.load("configs/benchmark/tiny.yml", ["decode.exact=true", override], BenchmarkRun)


def test_targets_whose_rows_depend_on_their_block_are_refused():
    with pytest.raises(errors.ConfigError, match="experts"):
        prepare("configs/random_tiny_moe.yml")
