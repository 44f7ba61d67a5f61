"""What is under deploy/: manifests against their schemas, scripts against the shell."""

import pathlib
import subprocess

import kubernetes_validate
import pytest
import yaml

from dflash import benchmark, decode, serve, train
from dflash.config import loader
from dflash.runs import shards

DEPLOY = pathlib.Path(__file__).parents[1] / "deploy"
MANIFESTS = sorted(DEPLOY.glob("*.yaml"))
SCRIPTS = sorted(DEPLOY.glob("*.sbatch"))
VERSION = "1.32"
COMMANDS = {
    f"dflash.{one.__name__.rpartition('.')[2]}": one for one in (benchmark, decode, serve, train)
}


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


def test_there_is_something_to_check():
    assert len(MANIFESTS) >= 3
    assert len(SCRIPTS) >= 2


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_fit_the_schemas(path):
    for one in objects(path):
        kubernetes_validate.validate(one, VERSION, strict=True)


def as_understood(one: dict) -> dict:
    """A JobSet as JobSet's own API reads it, which drops what it does not know.

    Raises:
      ValueError: a value is of another kind than in that API.
    """
    from kubeflow_trainer_api.models import jobset_v1alpha2_job_set as api  # Takes a second.

    return api.JobsetV1alpha2JobSet.from_dict(one).to_dict()


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_job_sets_fit_their_api(path):
    for one in yaml.safe_load_all(path.read_text()):
        if one["kind"] == "JobSet":
            assert as_understood(one) == one


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_commands_are_ours(path):
    """Every command parses: its config, its overrides and its flags."""
    for container in containers(path):
        words = [*container.get("command", ()), *container.get("args", ())]
        by_module = words[:2] == ["python", "-m"]
        name, rest = (words[2], words[3:]) if by_module else (".".join(words[:2]), words[2:])
        subcommand = COMMANDS[name].SUBCOMMAND
        given = [word for word in rest if not word.startswith("--")]
        flags = [word for word in rest if word.startswith("--")]
        values = subcommand.flag_values()
        values(["dflash", *flags])
        config, *overrides = given
        loader.load(config, overrides, subcommand.schema)


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


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_sound(path):
    assert path.read_text().startswith("#!/bin/bash\n")
    done = subprocess.run(["bash", "-n", path], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
