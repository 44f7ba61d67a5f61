"""Decodes prompts: python -m dflash.decode CONFIG [key=value ...] [--workdir DIR]."""

import contextlib
import sys

from dflash import cli
from dflash.config import loader, schema

DESCRIPTION = (
    "Decodes prompts with a target and a drafting strategy, losslessly: in float32 the output is "
    "the target's own, token for token."
)


def main(argv: list[str] | None = None) -> None:
    """The command; see `python -m dflash.decode --help`."""
    cli.run(
        _decode, name="dflash.decode", schema=schema.DecodeRun, description=DESCRIPTION, argv=argv
    )


def _decode(command: cli.Command) -> None:
    # jax is imported here, after the config has been found good.
    from dflash.common import distributed
    from dflash.inference import job as jobs

    distributed.initialize(command.coordinator_address, command.num_processes, command.process_id)
    job = jobs.prepare(command.config, stdin=sys.stdin, dry=command.dry_run)
    if command.dry_run:
        print("\n".join(job.plan().lines()))
        return
    with _open(command) as (records, display):
        pending = _agree(job.prompts, records.pending(job.prompts))
        if pending:
            with display.status("loading weights"):
                job.load_weights()
            _run(command, job, pending, records, display)
        _report(job, records, display)


@contextlib.contextmanager
def _open(command: cli.Command):
    """The records and the display of this process: of several, only the first has real ones."""
    import jax

    from dflash.common import workdir
    from dflash.common.display import Display

    first = jax.process_index() == 0
    display = Display(stream=command.stream) if first else Display.silent()
    records = workdir.Records()
    if command.workdir and first:
        config_yaml = loader.to_yaml(command.config)
        records = workdir.Workdir.open(command.workdir, config_yaml, command.config_hash)
    with records:
        try:
            yield records, display
        finally:
            display.close()


def _agree(prompts, pending):
    """What the first process found pending: it alone knows what earlier runs have done."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    if jax.process_count() == 1:
        return pending
    open_indices = {prompt.index for prompt in pending}
    mask = np.array([prompt.index in open_indices for prompt in prompts])
    mask = multihost_utils.broadcast_one_to_all(mask)
    return [prompt for prompt, is_open in zip(prompts, mask, strict=True) if is_open]


def _run(command: cli.Command, job, pending, records, display) -> None:
    """Decodes the pending prompts, showing text as it is accepted and recording what is done."""
    import jax

    from dflash.common.display import summary_line
    from dflash.common.tokenizer import IncrementalDecoder
    from dflash.inference import scheduler

    engine = job.engine()
    with display.status("compiling"):
        engine.compile(len(prompt.ids) for prompt in pending)
    by_index = {prompt.index: prompt for prompt in pending}
    words = {index: IncrementalDecoder(job.tokenizer) for index in by_index}
    display.expect({index: len(prompt.ids) for index, prompt in by_index.items()})
    profile = command.profile_dir
    with jax.profiler.trace(profile) if profile else contextlib.nullcontext():
        for event in scheduler.decode(engine, job.requests(pending)):
            if isinstance(event, scheduler.Tokens):
                display.token(event.index, words[event.index].push(event.ids))
                continue
            display.token(event.index, words.pop(event.index).flush())
            record = records.append(_record(by_index[event.index], event, job.tokenizer))
            display.finish(event.index, summary_line(record))


def _record(prompt, completion, tokenizer):
    """A line of outputs.jsonl."""
    from dflash.common.outputs import Record

    return Record(
        index=prompt.index,
        prompt=prompt.text if prompt.messages is None else prompt.messages,
        prompt_ids=prompt.ids,
        output_ids=completion.output_ids,
        text=tokenizer.decode(completion.output_ids),
        finish_reason=completion.finish_reason,
        acceptance_lengths=completion.acceptance_lengths,
        prefill_ms=completion.prefill_ms,
        decode_ms=completion.decode_ms,
        decode_clock_s=completion.decode_clock_s,
    )


def _report(job, records, display) -> None:
    """Sums up all prompts, those of earlier runs on the same work directory included."""
    import jax

    from dflash.common import outputs

    summary = outputs.summarize(records.completed().values(), block_size=job.drafter.block_size)
    devices = [f"{device.platform}:{device.device_kind}" for device in job.target.sharding.devices]
    records.write_results(
        summary, devices=devices, processes=jax.process_count(), versions=outputs.versions()
    )
    display.results(summary)


if __name__ == "__main__":
    main()
