"""Four processes of which one fails, at one place after the other: prints how all of them end.

Usage: four_processes.py DIRECTORY [PLACE …]
Prints a line of JSON: by place, for each process its exit status, seconds and lines on stderr.

The processes of a place are forked from this one, which has imported everything and has no device.
"""

import dataclasses
import functools
import io
import json
import os
import pathlib
import signal
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from support import examples, forked, xla_flags

os.environ["XLA_FLAGS"] = xla_flags.quick(devices=1)
os.environ["JAX_PLATFORMS"] = "cpu"
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh

from dflash import decode
from dflash.checkpoints import files as checkpoint_files
from dflash.cli import processes
from dflash.cli import subcommand as cli
from dflash.config import loader, schema
from dflash.data import datasets, mixture
from dflash.data.batches import Batches
from dflash.offline import decode_run
from dflash.parallel import sharding as sharding_lib
from dflash.runs import dates
from dflash.text.tokenizer import ByteTokenizer
from dflash.training import state as states
from dflash.training import step as steps_lib
from dflash.training.checkpoints import Checkpoints
from support.models import BYTE_TARGET, make_sharding

COUNT = 4
PATIENCE_S = 600
CONFIG = f"""
target: {BYTE_TARGET}
mesh: {{data: {COUNT}}}
decode: {{max_new_tokens: 4, page_size: 16, batch_size: {COUNT}}}
"""


def fail(number: int):
    """A function that fails as the system does."""

    def call(*unused, **options):
        raise OSError(number, os.strerror(number))

    return call


def open_checkpoints(directory: pathlib.Path) -> tuple[Checkpoints, states.TrainState]:
    """The checkpoints of a run, and a state whose array is split over the processes."""
    sharding = make_sharding(data=COUNT)
    split = sharding.named((8,), ("batch",))
    params = {"w": jax.jit(lambda: jnp.arange(8.0), out_shardings=split)()}
    # As after a step: Orbax cannot read what jax.device_put has given to several processes.
    state = jax.jit(lambda x: x)(states.create(params, optax.sgd(0.1), 0, sharding))
    return Checkpoints(directory / "checkpoints", keep_last=2), state


def save(directory: pathlib.Path, process: int) -> None:
    if process == 3:
        ocp.CheckpointManager.save = fail(28)
    checkpoints, state = open_checkpoints(directory / "save")
    checkpoints.save(1, state, {}, best=None)
    checkpoints.wait()


def saved(directory: pathlib.Path, process: int) -> None:
    checkpoints, state = open_checkpoints(directory)
    for step in (1, 2):
        checkpoints.save(step, state, {}, best=None)
    checkpoints.wait()


def restore(directory: pathlib.Path, process: int) -> None:
    if process == 2:
        Checkpoints._restore = fail(5)
    checkpoints, state = open_checkpoints(directory)
    checkpoints.restore(state, print)
    multihost_utils.sync_global_devices("restored")


def damaged(directory: pathlib.Path, process: int) -> None:
    """One process finds damage in its share of the files, and all go back a step."""
    checkpoints, state = open_checkpoints(directory)
    if process == 1:
        file = max((directory / "checkpoints" / "2" / "state").rglob("*"), key=size)
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    multihost_utils.sync_global_devices("damaged")
    notes = []
    found = checkpoints.restore(state, notes.append)
    print(f"restored {found.step}: {len(notes)} damaged", file=sys.stderr)


def size(path: pathlib.Path) -> int:
    return path.stat().st_size if path.is_file() else -1


def export(directory: pathlib.Path, process: int) -> None:
    with checkpoint_files.staged(directory / "hf"):
        if process == 0:
            fail(28)()
        multihost_utils.process_allgather(np.zeros(3))


def data(directory: pathlib.Path, process: int) -> None:
    """The first process encodes what all read."""
    own = directory / f"examples-{process}"
    own.mkdir()
    config = examples.config(own, 40, data_dir=str(directory / "data"))
    rows = mixture.open_mixture(config, datasets.find_all(config), ByteTokenizer())
    source = Batches(rows, batch_size=COUNT, mine=(process,))
    print(f"row {next(source)['tokens'].sum()}", file=sys.stderr)


def work_directory(directory: pathlib.Path, process: int) -> None:
    (directory / "taken").touch()
    config = loader.load(str(directory / "c.yml"), (), schema.DecodeRun)
    with decode_run.open_records(directory / "taken" / "w", config):
        multihost_utils.sync_global_devices("decoding")


def standard_input(directory: pathlib.Path, process: int) -> None:
    sys.stdin = io.TextIOWrapper(io.BytesIO(b"\xff" if process == 0 else b""), "utf-8")
    run_decode(directory)


def prompts(directory: pathlib.Path, process: int) -> None:
    run_decode(directory, f"prompts.file={directory / 'prompts.jsonl'}")


def date(directory: pathlib.Path, process: int) -> None:
    (directory / "dated").mkdir(exist_ok=True)
    (directory / "dated" / dates.FILE).write_text("yesterday\n")
    run_decode(directory, workdir=directory / "dated")


def tokenizer(directory: pathlib.Path, process: int) -> None:
    if process == 3:
        ByteTokenizer.fingerprint = "another"
    run_decode(directory, "prompts.text=x")


def surprise(directory: pathlib.Path, process: int) -> None:
    if process == 2:
        raise KeyError("lost")
    multihost_utils.sync_global_devices("waiting for the others")


def terminated(directory: pathlib.Path, process: int) -> None:
    if process == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    multihost_utils.sync_global_devices("waiting for the others")


def killed(directory: pathlib.Path, process: int) -> None:
    multihost_utils.sync_global_devices("all are here")
    if process == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    multihost_utils.sync_global_devices("waiting for the others")


def rows(directory: pathlib.Path, process: int) -> None:
    """Each process feeds the rows of its two devices, which are apart in the mesh."""
    order = [0, 2, 3, 1, 4, 6, 7, 5]
    devices = np.array(sorted(jax.devices(), key=lambda one: (one.process_index, one.id)))[order]
    types = (AxisType.Auto,) * 4
    mesh = Mesh(devices.reshape(1, 8, 1, 1), sharding_lib.MESH_AXES, axis_types=types)
    sharding = sharding_lib.Sharding(mesh, (("batch", ("data", "fsdp")),))
    mine = steps_lib.rows_of_process(sharding, 16)
    batch = np.arange(48, dtype=np.int32).reshape(16, 3)
    placed = steps_lib.place({"x": batch[list(mine)]}, sharding, 16)["x"]
    found = multihost_utils.process_allgather(placed, tiled=True)
    print(f"rows {mine}: {np.array_equal(found, batch)}", file=sys.stderr)


def nothing(directory: pathlib.Path, process: int) -> None:
    multihost_utils.sync_global_devices("all are here")


def run_decode(directory: pathlib.Path, *overrides: str, workdir=None) -> None:
    places = {} if workdir is None else {"workdir": workdir}
    decode._decode(cli.parse(decode.SUBCOMMAND, directory / "c.yml", *overrides, **places))


PLACES = {
    one.__name__: one
    for one in (
        *(save, saved, restore, damaged, export, work_directory, standard_input),
        *(data, prompts, date, tokenizer, surprise, terminated, killed, rows, nothing),
    )
}


def go_to(place: str, directory: pathlib.Path, given: tuple[str, int, int]) -> int:
    """What each process does at a place; returns its exit status."""
    work = PLACES[place]
    if work is rows:
        os.environ["XLA_FLAGS"] = xla_flags.quick(devices=2)
    return cli.status_of(
        lambda: processes.run(given, lambda group: work(directory, given[-1]) or 0)
    )


def main() -> None:
    directory, *places = sys.argv[1:]
    directory = pathlib.Path(directory)
    (directory / "c.yml").write_text(CONFIG)
    (directory / "prompts.jsonl").write_text('{"prompt": "x"}\n{"promt": "y"}\n')
    ends = {}
    for place in places or PLACES:
        with forked.Forked(functools.partial(go_to, place, directory), COUNT, directory) as all_:
            all_.wait(PATIENCE_S)
            ends[place] = [one and dataclasses.astuple(one) for one in all_.ends]
    print(json.dumps(ends))


if __name__ == "__main__":
    main()
