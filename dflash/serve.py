"""Serves a target over HTTP: dflash serve CONFIG [key=value ...] [--host HOST] [--port PORT]."""

import dataclasses
import importlib.util

from absl import flags

from dflash import errors
from dflash.cli import subcommand as cli
from dflash.config import serve_schema
from dflash.version import install_command

_REQUIRED = ("starlette", "uvicorn", "prometheus_client", "pydantic")


def _define_flags(values: flags.FlagValues) -> None:
    where = {"flag_values": values}
    flags.DEFINE_string(
        "host", "127.0.0.1", "Address to listen on; 0.0.0.0 is all interfaces.", **where
    )
    flags.DEFINE_integer(
        "port",
        8000,
        "Port to listen on; 0 chooses a free one.",
        lower_bound=0,
        upper_bound=65535,
        **where,
    )


SUBCOMMAND = cli.Subcommand(
    "serve",
    "Serves a target with a drafting strategy over HTTP: OpenAI's endpoints, SGLang's /generate, "
    "vLLM's metrics, and a page at /. Requests are batched continuously. The server prints its URL "
    "to stdout once it serves requests. If DFLASH_API_KEY is set, clients must send it as a bearer "
    "token. Prompts of the config are ignored. It needs pip install 'dflash-jax[serve]'.",
    examples=(
        "dflash serve configs/tiny_dflash.yml",
        "dflash serve configs/tiny_dflash.yml drafter.name=none --port 8001",
        "dflash serve configs/qwen3_4b_dflash.yml decode.batch_size=32 --host 0.0.0.0",
        "dflash serve configs/qwen3_4b_dflash.yml decode.max_length=16384 --dry_run",
        "dflash serve hf:Qwen/Qwen3-0.6B drafter.name=ngram",
    ),
    schema=serve_schema.ServeRun,
    shared=tuple(name for name in cli.RUN_FLAGS if name != "workdir"),
    define_flags=_define_flags,
    statuses="0 also after SIGTERM, once running requests have ended",
)


def _serve(command: cli.Command) -> int:
    missing = [name for name in _REQUIRED if importlib.util.find_spec(name) is None]
    if missing:
        raise errors.ConfigError(f"{missing[0]}: not installed; {install_command('serve')}")
    # Import jax only now, so that a bad config fails without waiting for the import.
    import jax

    from dflash.loading import job as jobs
    from dflash.runs import dates
    from dflash.runs.display import Display
    from dflash.serving import server
    from dflash.serving.backend import Backend

    dry = command.dry_run
    host, port, config = command.flags["host"], command.flags["port"], command.config
    job = jobs.prepare_models(config, dry=dry, date=None if dry else dates.find(None))
    job = job.with_room().with_adapters(config.serve.adapters)
    if dry:
        plan = job.plan(grammars=config.serve.grammars)
        print("\n".join([*plan.lines(), *job.notes()]))
        return 0
    if jax.process_index() > 0:
        return server.follow(Backend(job, config, Display.silent()))
    display = Display(stream=False)
    for line in job.notes():
        display.note(line)
    listener = server.listen(host, port)
    limits = dataclasses.replace(config.serve, hosts=(*config.serve.hosts, host))
    config = dataclasses.replace(config, serve=limits)
    return server.run(
        Backend(job, config, display),
        listener,
        on_ready=lambda url: print(url, flush=True),
        profile_dir=command.profile_dir,
    )


main = cli.entry_point(SUBCOMMAND, _serve)

if __name__ == "__main__":
    main()
