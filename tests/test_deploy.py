"""What is under deploy/: manifests against their schemas, scripts against the shell."""

import pathlib
import re
import subprocess

import kubernetes_validate
import pytest
import yaml

from dflash import benchmark, convert, decode, serve, train
from dflash.config import loader
from dflash.loading import job as jobs
from dflash.parallel.chips import CHIPS
from dflash.runs import shards

DEPLOY = pathlib.Path(__file__).parents[1] / "deploy"
MANIFESTS = sorted(DEPLOY.glob("*.yaml"))
SCRIPTS = sorted([*DEPLOY.glob("*.sbatch"), *DEPLOY.glob("*.sh")])
VERSION = "1.32"
COMMANDS = {one.SUBCOMMAND.name: one for one in (benchmark, convert, decode, serve, train)}


def objects(path: pathlib.Path) -> list[dict]:
    """The objects of a manifest; of a JobSet, the Jobs that its controller makes of it."""
    found = []
    for one in yaml.safe_load_all(path.read_text()):
        if one["kind"] != "JobSet":
            found.append(one)
            continue
        assert one["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
        for job in one["spec"]["replicatedJobs"]:
            name = f"{one['metadata']['name']}-{job['name']}-0"
            made = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}}
            found.append(made | {"spec": job["template"]["spec"]})
    return found


def containers(path: pathlib.Path) -> list[dict]:
    specs = [one["spec"] for one in objects(path)]
    pods = [spec["template"]["spec"] for spec in specs if "template" in spec]
    return [container for pod in pods for container in pod["containers"]]


def as_understood(one: dict) -> dict:
    """A JobSet as JobSet's own API reads it, which drops what it does not know.

    Raises:
      ValueError: a value is of another kind than in that API.
    """
    from kubeflow_trainer_api.models import jobset_v1alpha2_job_set as api  # Takes a second.

    return api.JobsetV1alpha2JobSet.from_dict(one).to_dict()


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_fit_the_schemas_and_the_api_of_job_sets(path):
    for one in objects(path):
        kubernetes_validate.validate(one, VERSION, strict=True)
    for one in yaml.safe_load_all(path.read_text()):
        if one["kind"] == "JobSet":
            assert as_understood(one) == one


STUB = """#!/bin/sh
printf '%s\\n' "$(basename "$0")" "$@" "" >> "$CALLS"
[ "$(basename "$0")" != gcloud ]  # Nothing is in the bucket yet.
"""


def calls(script: pathlib.Path, directory: pathlib.Path) -> list[list[str]]:
    """Runs a script with programs that only write down how they are called."""
    assert script.read_text().startswith("#!/bin/bash\n")
    for name in ("python", "dflash", "srun", "gcloud"):
        (directory / name).write_text(STUB)
        (directory / name).chmod(0o755)
    environment = {
        "PATH": f"{directory}:/usr/bin:/bin",
        "HOME": str(directory),
        "CALLS": str(directory / "calls"),
        "SLURM_ARRAY_TASK_ID": "3",
    }
    subprocess.run(["bash", script, "BUCKET"], env=environment, check=True, capture_output=True)
    return [call.splitlines() for call in (directory / "calls").read_text().split("\n\n")]


def commands(path: pathlib.Path, directory: pathlib.Path) -> list[list[str]]:
    """Returns the commands of a manifest or a script that are ours, as [name, *arguments]."""
    if path in MANIFESTS:
        lines = [[*one.get("command", ()), *one.get("args", ())] for one in containers(path)]
    else:
        lines = calls(path, directory)
    found = []
    for words in lines:
        at = next((i for i, word in enumerate(words) if re.match(r"dflash(\.|$)", word)), None)
        if at is not None:
            name = words[at].removeprefix("dflash").removeprefix(".")
            found.append([*([name] if name else []), *words[at + 1 :]])
    return found


def parsed(name: str, arguments: list[str], *overrides: str):
    """Returns the config of a command, None if it takes none; its flags are checked."""
    subcommand = COMMANDS[name].SUBCOMMAND
    flags = [word for word in arguments if word.startswith("--")]
    subcommand.flag_values()(["dflash", *flags])
    given = [word for word in arguments if not word.startswith("--")]
    if not subcommand.takes_config:
        return None
    return loader.load(given[0], [*given[1:], *overrides], subcommand.schema)


@pytest.mark.parametrize("path", [*MANIFESTS, *SCRIPTS], ids=lambda path: path.name)
def test_commands_are_ours(path, tmp_path):
    """Every command parses: its config, its overrides and its flags."""
    found = commands(path, tmp_path)
    assert found
    for name, *arguments in found:
        parsed(name, arguments)


# A command that decodes, and the chip that the file names.
DECODING = [("serve.yaml", 0, "v5e"), ("decode_shards.yaml", 0, "v5e"), ("v5p8.sh", -2, "v5p")]
ROOM = 0.9  # The rest of the memory is for what programs need while they run.


@pytest.mark.parametrize(("file", "index", "chip"), DECODING)
def test_a_run_fits_its_chip(file, index, chip, tmp_path):
    name, *arguments = commands(DEPLOY / file, tmp_path)[index]
    random = ("target.checkpoint=random", "drafter.checkpoint=random")
    job = jobs.prepare_models(parsed(name, arguments, *random), dry=True).with_room()
    needed = sum(share.device_bytes for share in job.plan().memory.values())
    assert needed <= ROOM * CHIPS[chip].hbm_gb * 1e9


def test_each_pod_finds_its_shard():
    (job,) = objects(DEPLOY / "decode_shards.yaml")
    (container,) = containers(DEPLOY / "decode_shards.yaml")
    environment = {one["name"]: one["value"] for one in container["env"]}
    count = job["spec"]["completions"]
    found = [
        shards.parse("auto", environment | {"JOB_COMPLETION_INDEX": str(index)})
        for index in range(count)
    ]
    assert found == shards.Shard(0, count).all()
