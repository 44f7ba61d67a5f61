"""Below float32, on one CPU: drafting changes no output of the shipped family in any precision.

The kernels give a row the same bits whatever stands beside it. Weights as small as those of other
contract tests are multiplied without kernels, so these tests take the shipped models.
"""

import functools

import pytest
from support.engines import completions

from dflash.config import loader
from dflash.config.schema import DecodeRun
from dflash.loading import job as jobs
from dflash.offline.decoding import decode

COMMON = (
    *("prompts.text=[]", "prompts.dataset=math", "prompts.limit=4"),
    # One program serves prompts of all lengths.
    *("decode.max_new_tokens=32", "decode.sync_every=4", "decode.prefill_chunk=32"),
)
BFLOAT16 = ("dtype=bfloat16",)
PRECISIONS = {
    "bfloat16": BFLOAT16,
    "int8": (*BFLOAT16, "target.quantization=int8"),
    "w8a8": (*BFLOAT16, "target.quantization=w8a8"),
    "float8": (*BFLOAT16, "target.quantization=float8_e4m3fn"),
    "int8-cache": (*BFLOAT16, "decode.kv_dtype=int8"),
    "float8-cache": (*BFLOAT16, "decode.kv_dtype=float8_e4m3fn"),
    "float32-int8": ("dtype=float32", "target.quantization=int8", "decode.kv_dtype=int8"),
}
STRATEGIES = {
    "dflash2": ("configs/tiny_dflash2.yml",),
    "dflash2-tree": ("configs/tiny_dflash2.yml", "drafter.tree.budget=16"),
    "dflash2-auto": ("configs/tiny_dflash2.yml", "drafter.block_size=auto"),
    "dflash": ("configs/tiny_dflash.yml",),
    "eagle3-tree": ("configs/tiny_eagle3.yml", "drafter.tree.budget=8"),
    "ngram": ("configs/tiny_dflash.yml", "drafter={name: ngram}"),
}
WAYS = {
    "alone": ("decode.batch_size=1",),
    "ragged": ("decode.batch_size=3",),
    "cached": ("decode.batch_size=4", "decode.prefix_cache=true"),
    "drawn": ("decode.batch_size=4", "decode.temperature=0.8"),
}
# Products and caches do not know the strategy: each precision meets a tree, and bfloat16 the rest.
CASES = [
    *((precision, "dflash2-tree", "drawn") for precision in PRECISIONS),
    ("int8", "dflash2", "drawn"),
    *(("bfloat16", name, "drawn") for name in STRATEGIES if name != "dflash2-tree"),
    *(("bfloat16", "dflash2-tree", way) for way in WAYS if way != "drawn"),
]


def prepare(config: str, *overrides: str) -> jobs.Job:
    job = jobs.prepare(loader.load(config, [*COMMON, *overrides], DecodeRun), stdin=None)
    job.load_weights()
    return job


def outputs(job: jobs.Job, times: int = 1) -> list:
    """Token ids of all prompts, as often as asked: a warm prefix cache serves the second time."""
    engine, found = job.engine(), []
    for _ in range(times):
        done = completions(decode(engine, job.requests(job.prompts)))
        found += [one.output_ids for one in done]
    return found


@functools.cache
def plain(precision: str, way: tuple[str, ...]) -> list:
    """Outputs of plain decoding, of eight sequences at a time."""
    job = prepare(*STRATEGIES["dflash"], *PRECISIONS[precision], *way, "decode.batch_size=8")
    return outputs(job.without_drafting())


@pytest.mark.parametrize(("precision", "name", "way"), CASES)
def test_output_is_that_of_plain_decoding(precision, name, way):
    job = prepare(*STRATEGIES[name], *PRECISIONS[precision], *WAYS[way])
    wanted = plain(precision, tuple(key for key in WAYS[way] if "temperature" in key))
    times = 2 if way == "cached" else 1
    assert outputs(job, times) == wanted * times
