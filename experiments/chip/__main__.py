"""Times cycles and their parts on one chip, with random weights and without a network.

    python -m experiments.chip --workdir runs/chip                    # Qwen3-4B and 8B, ten minutes
    python -m experiments.chip --workdir runs/chip                    # continues where that stopped
    python -m experiments.chip --workdir runs/chip --parts rows --models configs/qwen3_4b_dflash.yml
    JAX_PLATFORMS=cpu python -m experiments.chip --workdir runs/chip_tiny --minutes 3 \
        --models configs/random_tiny_dflash.yml --weights float32 --batches 1 2 --contexts 64

A call takes settings in the order of their importance: those that differ from the first value of
every list in one axis come before those that differ in two. It ends before a setting that takes
longer than is left of `--minutes`, by the time of the last ones. WORKDIR then has

    chip.json       every figure, error and call; written after every setting
    chip.md         a page for people: tables, plots, and the settings that were left out
    *.png           plots of the page
    programs/       compiled programs, which later calls read

| part | figures of a setting |
|---|---|
| `cycles` | ms of a cycle and its parts beside their floors: plain, DFlash, trees |
| `rows` | the same, of a cycle that verifies 1 to 1,024 rows and drafts nothing |
| `equality` | outputs identical to plain decoding, and the first differences |

A setting that fails, such as one that needs too much memory, is recorded with its error.
"""

import argparse
import dataclasses
import datetime
import functools
import gc
import itertools
import json
import pathlib
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import jax
import numpy as np

from dflash import errors
from dflash.config import loader
from dflash.config.schema import DecodeRun
from dflash.drafters.none import NoDrafter
from dflash.loading import job as jobs
from dflash.loading.job import Job
from dflash.measure import roofline
from dflash.measure.roofline import Machine
from dflash.parallel import sharding
from dflash.runs import compilation_cache, outputs
from dflash.storage import files
from experiments.chip import measure, page

PARTS = ("cycles", "equality", "rows")
ROWS = (1, 16, 32, 64, 128, 256, 512, 1024, 2, 4, 8)  # The most telling ones first.
PLAIN, ORACLE, EXACT = "plain", "oracle", "exact oracle"
_CHANGES = {"dflash": (), "tree": ("drafter.tree.budget=32",)}
_OPTIONS = _CHANGES | {EXACT: ("decode.exact=true",)}
_COMMON = "device", "overrides", "turns"  # Facts that all calls of a directory must share.
_RECENT = 3  # Number of settings whose times forecast that of the next one.


@dataclasses.dataclass(frozen=True)
class Setting:
    """Point of the grid; `strategy` is a name, or the number of rows."""

    part: str
    model: str
    weights: str
    batch: int
    context: int
    temperature: float
    strategy: str

    @property
    def key(self) -> str:
        """Returns the key of the setting in chip.json."""
        return " · ".join(map(str, dataclasses.astuple(self)))


def settings(options: argparse.Namespace) -> list[Setting]:
    """Returns the settings of the options, the most important ones first."""
    parts = PARTS if options.parts == "all" else (options.parts,)
    strategies = {
        "cycles": options.strategies,
        "rows": list(map(str, options.rows)),
        "equality": [*(name for name in options.strategies if name != PLAIN), ORACLE, EXACT],
    }
    placed = []
    for place, part in enumerate(parts):
        # Rows are compared greedily, and outputs after one context.
        temperatures = options.temperatures[:1] if part == "rows" else options.temperatures
        contexts = options.contexts[:1] if part == "equality" else options.contexts
        axes = options.models, options.weights, options.batches, contexts, temperatures
        for indices in itertools.product(*(range(len(axis)) for axis in axes)):
            point = [axis[index] for axis, index in zip(axes, indices, strict=True)]
            for number, strategy in enumerate(strategies[part]):
                order = sum(indices), indices[:2], place, indices[2:], number
                placed.append((order, Setting(part, *point, strategy)))
    return [setting for _, setting in sorted(placed, key=lambda entry: entry[0])]


def _config(setting: Setting, options: argparse.Namespace) -> DecodeRun:
    weights = [f"dtype={setting.weights}"]
    if setting.weights == "int8":
        weights = ["dtype=bfloat16", "target.quantization=int8", "drafter.quantization=int8"]
    return loader.load(
        setting.model,
        [
            *("target.checkpoint=random", "drafter.checkpoint=random", *weights),
            *_OPTIONS.get(setting.strategy, ()),
            *options.overrides,
            f"decode.batch_size={setting.batch}",
            f"decode.temperature={setting.temperature}",
            f"decode.sync_every={options.turns}",
        ],
    )


def _job(setting: Setting, config: DecodeRun, loaded: dict[tuple, Job]) -> Job:
    """Returns the models under a config, with weights; keeps the last target in `loaded`."""
    key = setting.model, setting.weights, config.decode.exact
    if key not in loaded:
        loaded.clear()
        gc.collect()
        job = jobs.prepare_models(config)
        job.load_target()
        loaded[key] = job
    job = loaded[key].with_drafter(config)
    if setting.strategy in _CHANGES:
        job.load_drafter()
    return job


def measured(setting: Setting, options: argparse.Namespace, loaded: dict, machine: Machine) -> dict:
    """Returns the figures of a setting, or its error in one line."""
    begin = time.perf_counter()
    try:
        job = _job(setting, _config(setting, options), loaded)
        figures = _figures(setting, options, job, machine)
    except Exception as error:  # Out of memory has no class of its own.
        text = str(error).strip().partition("\n")[0]
        figures = {"error": f"{type(error).__name__}: {text}"[:300]}
    gc.collect()
    return dataclasses.asdict(setting) | figures | {"seconds": time.perf_counter() - begin}


def _figures(setting: Setting, options: argparse.Namespace, job: Job, machine: Machine) -> dict:
    drafter, vocab_size, batch = job.drafter, job.target.arch.vocab_size, setting.batch
    if setting.part == "equality":
        count = batch * -(-options.prompts // batch)
        prompts = np.random.default_rng(0).integers(vocab_size, size=(count, setting.context))
        drafter = None if setting.strategy in (ORACLE, EXACT) else drafter
        of_outputs = prompts.tolist(), options.new_tokens
        return measure.compare(job.target, drafter, job.config.decode, *of_outputs)
    if setting.part == "rows":
        drafter = measure.fixed_drafter(int(setting.strategy), batch, vocab_size)
    elif setting.strategy == PLAIN:
        drafter = NoDrafter()
    sizes = {"context": setting.context, "repeats": options.repeats}
    return measure.time_cycle(job.target, drafter, job.config.decode, machine, **sizes)


def run(
    todo: list[Setting], measure_one: Callable[[Setting], dict], seconds: float, known: list[dict]
) -> Iterator[tuple[Setting, dict]]:
    """Yields settings with their figures until the next one would not end within `seconds`.

    Args:
      known: Figures of earlier calls, whose times forecast that of the first setting.
    """
    begin = time.monotonic()
    times = [figures["seconds"] for figures in known]
    for setting in todo:
        if time.monotonic() - begin + max(times[-_RECENT:], default=0.0) > seconds:
            return
        print(f"{time.monotonic() - begin:4.0f} s  {setting.key}", file=sys.stderr, flush=True)
        figures = measure_one(setting)
        times.append(figures["seconds"])
        yield setting, figures


def about(options: argparse.Namespace, arguments: list[str], machine: Machine) -> dict:
    """Returns the facts of a call that its figures depend on."""
    git = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    device = jax.devices()[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(["python", "-m", "experiments.chip", *arguments]),
        "commit": commit or "unknown",
        "device": f"{device.device_kind} ({device.platform}), 1 of {jax.device_count()}",
        "versions": outputs.versions() | {"backend": device.client.platform_version},
        "machine": dataclasses.asdict(machine),
        "overrides": options.overrides,
        "turns": options.turns,
        "repeats": options.repeats,
    }


def main(arguments: list[str]) -> None:
    """Measures settings for some minutes, and writes chip.json and chip.md."""
    begin, options = time.monotonic(), _parser().parse_intermixed_args(arguments)
    options.workdir.mkdir(parents=True, exist_ok=True)
    compilation_cache.enable(str((options.workdir / "programs").resolve()))
    path = options.workdir / "chip.json"
    store = json.loads(path.read_text("utf-8")) if path.exists() else {"calls": [], "settings": {}}
    machine = roofline.machine_of(sharding.make_sharding({}, {}))
    call = about(options, arguments, machine)
    for earlier in store["calls"]:
        for name in _COMMON:
            if earlier[name] != call[name]:
                raise errors.InputError(
                    f"{path} has figures with {name} {earlier[name]}, and this call has "
                    f"{call[name]}; choose another --workdir"
                )
    store["calls"].append(call)
    finished = store["settings"]
    wanted = settings(options)
    is_ready = {key for key, one in finished.items() if not (options.retry and "error" in one)}
    todo = [setting for setting in wanted if setting.key not in is_ready]
    measure_one = functools.partial(measured, options=options, loaded={}, machine=machine)
    call["left_out"] = [setting.key for setting in todo]
    seconds = 60 * options.minutes - (time.monotonic() - begin)
    for setting, figures in run(todo, measure_one, seconds, list(finished.values())):
        finished[setting.key] = figures
        call["left_out"].remove(setting.key)
        _save(store, options.workdir)
    _save(store, options.workdir)
    print(options.workdir / "chip.md")


def _save(store: dict, directory: pathlib.Path) -> None:
    files.write_whole(directory / "chip.json", json.dumps(store, indent=1))
    page.write(store, directory)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.chip", description=__doc__.partition("\n")[0]
    )
    add = parser.add_argument
    models = ["configs/qwen3_4b_dflash.yml", "configs/qwen3_8b_dflash.yml"]
    add("overrides", nargs="*", help="key=value for every config")
    add("--workdir", type=pathlib.Path, required=True, help="an earlier one continues")
    add("--minutes", type=float, default=10.0)
    add("--parts", choices=(*PARTS, "all"), default="all")
    add("--models", nargs="+", default=models, help="configs with a DFlash drafter")
    add("--weights", nargs="+", default=["bfloat16", "int8"], help="dtypes, or int8")
    add("--strategies", nargs="+", default=[PLAIN, *_CHANGES], choices=[PLAIN, *_CHANGES])
    add("--batches", nargs="+", type=int, default=[1, 8, 64])
    add("--contexts", nargs="+", type=int, default=[512, 4096])
    add("--temperatures", nargs="+", type=float, default=[0.0, 0.7])
    add("--rows", nargs="+", type=int, default=ROWS)
    add("--turns", type=int, default=16, help="turns of each timed loop")
    add("--repeats", type=int, default=5, help="timings per loop, of which the median counts")
    add("--prompts", type=int, default=8, help="least number of outputs to compare")
    add("--new_tokens", type=int, default=64, help="tokens of each output")
    add("--retry", action="store_true", help="measure settings with an error again")
    return parser


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except errors.UserError as error:
        sys.exit(f"error: {error}")
