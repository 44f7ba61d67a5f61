"""Sweep points that decode, and keep models loaded while the next point needs them."""

import dataclasses
import datetime
import io
import pathlib
from collections.abc import Mapping
from typing import Any

from dflash import errors
from dflash.config import loader
from dflash.config.schema import DecodeRun
from dflash.loading import job as jobs
from dflash.loading.job import Job
from dflash.offline import decode_run
from dflash.runs import dates
from dflash.runs.display import Display
from dflash.runs.sweeps import Runner


class DecodePoints(Runner):
    """Runner that decodes at each point; its directory is a work directory of `dflash.decode`."""

    metrics = (
        "tau",
        "tokens_per_second",
        "speed_up",
        "ttft_ms",
        "tpot_ms",
        "cycles",
        "prompts",
        "output_tokens",
        "decode_seconds",
    )
    shown = ("tau", "tokens_per_second", "speed_up")

    def __init__(self, display: Display):
        super().__init__(display)
        self._weights = Weights(display)
        self._checked: dict[str, Job] = {}

    def check(self, config: DecodeRun) -> None:
        self._checked[loader.config_hash(config)] = _prepare(config, datetime.date.today())

    def affinity(self, config: DecodeRun) -> str:
        return jobs.target_key(config)

    def run(self, config: DecodeRun, directory: pathlib.Path) -> Mapping[str, Any]:
        date = dates.find(directory)
        job = self._checked.pop(loader.config_hash(config), None)
        if job is None or job.date != date:  # The point was started on another day.
            job = _prepare(config, date)
        with decode_run.open_records(directory, config, date) as records:
            results = decode_run.run(job, records, Display.silent(), load=self._weights)
        return results | {"speed_up": results.get("baseline", {}).get("speed_up")}


class Weights:
    """Loader of jobs' weights that reads only those that differ from the previous job's."""

    def __init__(self, display: Display):
        """Creates the loader; the display shows a line for each load."""
        self._display = display
        self._loaded: dict[str, tuple[str, Any]] = {}  # Key and model by role.

    def __call__(self, job: Job) -> Job:
        """Returns the job with loaded models.

        Raises:
          CheckpointError: A checkpoint is damaged, or does not fit its model.
        """
        target = jobs.target_key(job.config)
        drafter = loader.config_hash({"target": target, "drafter": job.config.drafter})
        keys = {"target": target, "drafter": drafter}
        # Free models that are no longer needed first: memory may not hold both.
        self._loaded = {
            role: (key, model) for role, (key, model) in self._loaded.items() if key == keys[role]
        }
        for role, key in keys.items():
            job = self._with_model(role, key, job)
        return job

    def _with_model(self, role: str, key: str, job: Job) -> Job:
        if role in self._loaded:
            return dataclasses.replace(job, **{role: self._loaded[role][1]})
        load = {"target": job.load_target, "drafter": job.load_drafter}[role]
        with self._display.status(f"loading the {role}"):
            load()
        self._loaded[role] = key, getattr(job, role)
        return job


def _prepare(config: DecodeRun, date: datetime.date) -> Job:
    named = config.prompts
    if not named.text and named.file is None and named.dataset is None:
        raise errors.ConfigError(
            "prompts: required: text, file or dataset; a sweep reads no prompts from stdin"
        )
    return jobs.prepare(config, stdin=io.StringIO(), date=date)
