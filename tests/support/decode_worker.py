"""One process of several that decode together: prints the outputs as a line of JSON.

Usage: decode_worker.py COORDINATOR NUM_PROCESSES PROCESS_ID TASK
TASK is JSON: names of drafters, of those whose block size is chosen, of those that also decode with
grammars, of those whose rows are divided ("-tree" ends the names of trees), mesh, prompts, limits,
and sampling options; and the family of the target, if it is one of `other_targets`.
"""

import json
import os
import pathlib
import sys

os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=2"
sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from dflash.parallel import distributed


def main() -> None:
    coordinator, processes, process, task = sys.argv[1:]
    distributed.initialize(coordinator, int(processes), int(process))
    task = json.loads(task)

    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    from support import other_targets
    from support.engines import decode, engine
    from support.models import ARCHITECTURE, drafter, make_sharding, target

    assert jax.process_count() == 2
    assert jax.device_count() == 4
    mesh, family = tuple(task["mesh"]), task.get("family")
    on, arch = target(mesh), ARCHITECTURE
    if family is not None:
        on = other_targets.build(family, make_sharding(*mesh))
        arch = other_targets.SHAPES[family]
    outputs = {}
    for name in task["drafters"]:
        model = drafter(name, mesh=mesh, arch=arch)
        adaptive = name in task.get("adaptive", ())
        run = engine(
            model, on=on, batch_size=2, sync_every=4, max_length=48, adaptive_blocks=adaptive
        )
        if adaptive:
            run.compile(map(len, task["prompts"]))
            run.time_cycles()
            tables = multihost_utils.process_allgather(np.array(run.cycle_seconds))
            assert (tables[0] == tables[1]).all(), f"processes differ in their tables: {tables}"
        done = decode(run, task["prompts"], task["limits"], **task["options"])
        outputs[name] = [one.output_ids for one in done]
        if name in task.get("constrained", ()):
            outputs[f"{name}, constrained"] = decode_constrained(run, task)
    for name in task.get("cached", ()):
        outputs[f"{name}, cached"] = decode_cached(name, mesh, task)
    for name in task.get("divided", ()):
        outputs[f"{name}, divided"] = decode_divided(name, mesh, task)
    print(json.dumps(outputs))


def decode_constrained(run, task: dict) -> list:
    """The outputs with a grammar for every other prompt: each process makes its own masks."""
    from support import grammars

    return grammars.decode_some(run, task["prompts"], task["limits"], **task["options"])


def decode_divided(name: str, mesh: tuple[int, ...], task: dict) -> list:
    """The outputs, with grammars for some, of cycles that divide their rows in each replica."""
    from support.engines import divide_always, engine
    from support.models import drafter

    tree = name.endswith("-tree")
    model = drafter(name.removesuffix("-tree"), mesh=mesh, tree=tree, block_size=4)
    run = engine(model, mesh=mesh, batch_size=4, sync_every=4, max_length=48, adaptive_blocks=True)
    divide_always(run)
    return decode_constrained(run, task)


def decode_cached(name: str, mesh: tuple[int, ...], task: dict) -> list:
    """The outputs of one prompt after the other, each given twice, with few pages."""
    from dflash.inference.scheduler import Scheduler
    from support.engines import completions, drain, engine, make_requests
    from support.models import drafter

    options = {"page_size": 8, "num_pages": 18, "prefix_cache": True, "max_length": 48}
    run = engine(drafter(name, mesh=mesh), mesh=mesh, batch_size=2, sync_every=4, **options)
    one = Scheduler(run)
    requests = make_requests(task["prompts"], task["limits"], **task["options"])
    rounds = [completions(drain(one, requests)) for _ in range(2)]
    outputs, again = ([each.output_ids for each in done] for done in rounds)
    assert again == outputs
    assert sum(each.cached_tokens for done in rounds for each in done) > 0, "the cache has nothing"
    assert one.stats().pages_used == 0
    return outputs


if __name__ == "__main__":
    main()
