"""Parsing, checks, execution and exit statuses of subcommands.

    dflash COMMAND CONFIG [key=value ...] [--flags]

Flags set where and how a run happens; the config holds everything that can change a number.

The exit status is 2 for unusable usage, config, input or checkpoint, and 1 for a run that failed.
"""

import dataclasses
import functools
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from absl import flags

from dflash import errors
from dflash.cli.declaration import JOIN_FLAGS, Subcommand, help_text
from dflash.cli.declaration import RUN_FLAGS as RUN_FLAGS
from dflash.config import loader, merging, registry, schema
from dflash.parallel import host
from dflash.runs import shards
from dflash.runs.shards import Shard

if TYPE_CHECKING:
    from dflash.parallel.agreement import ProcessGroup

_USAGE_ERROR = 2


@dataclasses.dataclass(frozen=True)
class Command:
    """Parsed command line, with defaults for flags that the subcommand does not take.

    Attributes:
      config: Resolved config, an instance of the subcommand's schema; None without CONFIG.
      config_path: Path of the config file, or a checkpoint.
      overrides: Arguments of the form key=value.
      arguments: Positional arguments of a subcommand without CONFIG.
      workdir: Directory for results; None prints them only.
      profile_dir: Directory for a profiler trace, or None.
      shard: Part of the work, if the run is divided; None is all of it.
      compilation_cache: Argument of `compilation_cache.enable`.
      flags: Values of the subcommand's own flags, by name.
    """

    config: Any = None
    config_path: str = ""
    overrides: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    workdir: str | None = None
    dry_run: bool = False
    profile_dir: str | None = None
    shard: Shard | None = None
    stream: bool = True
    compilation_cache: str | None = None
    flags: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def run(
    subcommand: Subcommand,
    work: Callable[[Command], int | None],
    argv: Sequence[str] | None = None,
) -> NoReturn:
    """Runs a subcommand and exits with its status.

    Args:
      work: Runs the parsed command and returns an exit status; None is 0.
      argv: Arguments after the names of program and subcommand; None takes those of the process.
    Raises:
      SystemExit: Always, with the status of `status_of`; 2 for wrong usage.
    """
    argv = sys.argv[1:] if argv is None else argv
    status = status_of(lambda: _run(subcommand, work, argv))
    threads = threading.enumerate()
    if status == errors.INTERRUPTED and any(t.name.startswith(host.COMPILING) for t in threads):
        os._exit(status)  # Python would wait for the compiler, which cannot be interrupted.
    sys.exit(status)


def entry_point(
    subcommand: Subcommand, work: Callable[[Command], int | None]
) -> Callable[..., NoReturn]:
    """Returns the `main(argv=None)` of a command's module; see `run`."""
    return functools.partial(run, subcommand, work)


def status_of(work: Callable[[], int | None]) -> int:
    """Calls `work`, prints a UserError as lines on stderr, and returns the exit status.

    Returns:
      The result of `work`, 0 for None; the status of a UserError; 130 if interrupted; 141 if the
      reader of stdout has closed it.
    """
    try:
        status = work() or 0
        sys.stdout.flush()
    except errors.UserError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return errors.INTERRUPTED
    except BrokenPipeError:
        # Python flushes stdout once more at exit, which must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return errors.BROKEN_PIPE
    return status


def _run(subcommand: Subcommand, work: Callable[[Command], int | None], argv: Sequence[str]) -> int:
    values = subcommand.flag_values()
    positional = _parse(subcommand, values, argv)
    if values.help:
        print(help_text(subcommand, values))
        return 0
    if subcommand.takes_config and (not positional or "=" in positional[0]):
        print(f"usage: {subcommand.usage}; see --help", file=sys.stderr)
        return _USAGE_ERROR

    def run_checked(group: "ProcessGroup | None" = None) -> int:
        # Only the first process writes, so only it checks where results go.
        writes = group is None or group.process == 0
        command = _checked(subcommand, values, positional, writes=writes)
        if command is None:
            return 0
        if group is not None:
            from dflash.cli import processes

            processes.check_alike(group, subcommand.name, command.config)
        _set_up(subcommand, command)
        return work(command) or 0

    join_arguments = [values[name].value if name in values else None for name in JOIN_FLAGS]
    # A plan touches no device, so it needs no other process.
    alone = any(name in values and values[name].value for name in ("dry_run", "print_config"))
    if alone or all(value is None for value in join_arguments):
        return run_checked()
    from dflash.cli import processes  # Imported late because it imports jax.

    return processes.run(join_arguments, run_checked)


def parse(subcommand: Subcommand, *arguments: str | os.PathLike, **flag_values: Any) -> Command:
    """Parses the arguments of a Python caller; the `run` functions of command modules use it.

    Args:
      *arguments: Positional arguments, overrides included.
      **flag_values: Values of flags by name; None is the default.
    Raises:
      UserError: An argument is unusable; the message is that of the command line.
    """
    values = subcommand.flag_values()
    words = [f"--{name}={value}" for name, value in flag_values.items() if value is not None]
    positional = _parse(subcommand, values, [*words, "--", *map(os.fspath, arguments)])
    command = _checked(subcommand, values, positional)
    _set_up(subcommand, command)
    return command


def _set_up(subcommand: Subcommand, command: Command) -> None:
    """Prepares jax after all arguments have been checked."""
    host.quiet_without_tpu()
    if subcommand.cpu_only and "jax" not in sys.modules:
        os.environ["JAX_PLATFORMS"] = "cpu"
    if "compilation_cache" in subcommand.shared and not command.dry_run:
        from dflash.runs import compilation_cache  # Imported late because it imports jax.

        compilation_cache.enable(command.compilation_cache)


def _plain(subcommand: Subcommand, values: flags.FlagValues, positional: list[str]) -> Command:
    names = subcommand.arguments
    if len(positional) != len(names):
        expected = " and ".join(names) or "no argument"
        count = f"{len(positional)} argument{'' if len(positional) == 1 else 's'}"
        raise errors.ConfigError(
            f"expected {expected}, not {count}; usage: {subcommand.usage}; see --help"
        )
    return Command(arguments=tuple(positional), **_values(values))


def _checked(
    subcommand: Subcommand,
    values: flags.FlagValues,
    positional: list[str],
    *,
    writes: bool = True,
) -> Command | None:
    """Returns the command with its checked arguments; None if the config was only printed.

    Args:
      writes: This process writes results.
    """
    if not subcommand.takes_config:
        return _plain(subcommand, values, positional)
    path, *overrides = positional
    overrides += subcommand.overrides(values)
    overrides = _with_strategy(path, overrides)
    load = subcommand.load or (lambda path, args: loader.load(path, args, subcommand.schema))
    config = load(path, overrides)
    if "print_config" in values and values.print_config:
        print(loader.to_yaml(config), end="")
        return None
    command = Command(
        config=config,
        config_path=path if merging.is_checkpoint(path) else str(loader.find_config(path)),
        overrides=tuple(overrides),
        **_values(values),
    )
    # A plan reads no data. Subcommands without --dry_run only make plans.
    reads = "dry_run" in subcommand.shared and not command.dry_run
    # The checks of checkpoints import numpy, which help and --print_config do not need.
    from dflash.cli import preflight

    preflight.check(subcommand.configs(config), files=reads)
    if writes and not command.dry_run:
        preflight.check_local(command.profile_dir)
        preflight.check_writable(command.workdir, command.profile_dir)
    preflight.check_bucket(command.compilation_cache)
    return command


def _with_strategy(path: str, overrides: Sequence[str]) -> list[str]:
    """Adds the strategy of a drafter's checkpoint, which no config names beside a bare target.

    Raises:
      CheckpointError: The drafter's checkpoint cannot be read, or no strategy has its architecture.
    """
    given = dict(override.partition("=")[::2] for override in overrides)
    reference = given.get("drafter.checkpoint", schema.RANDOM)
    if "drafter.name" in given or reference == schema.RANDOM or not merging.is_checkpoint(path):
        return list(overrides)
    host.quiet_without_tpu()
    from dflash.loading import models  # Imported late because it imports jax.

    return [f"drafter.name={models.find_strategy(reference)}", *overrides]


def _values(values: flags.FlagValues) -> dict[str, Any]:
    """Returns the values of flags as fields of `Command`."""
    known = {field.name for field in dataclasses.fields(Command)} - {"flags"}
    flag_values = {name: values[name].value for name in values if name not in ("help", "h")}
    unlisted = {*known, *JOIN_FLAGS, "print_config"}
    command_flags = {name: value for name, value in flag_values.items() if name not in unlisted}
    fields = {name: value for name, value in flag_values.items() if name in known}
    fields["flags"] = command_flags
    if fields.get("shard") is not None:
        fields["shard"] = shards.parse(fields["shard"], os.environ)
        if fields.get("workdir") is None:
            raise errors.ConfigError("--shard: needs --workdir, the same for all shards")
    return fields


def _parse(subcommand: Subcommand, values: flags.FlagValues, argv: Sequence[str]) -> list[str]:
    """Parses flags, which may be anywhere, into `values`; returns the positional arguments.

    Raises:
      ConfigError: Some flags are unknown (one line for each), or a value is unusable.
    """
    values.set_gnu_getopt(True)
    try:
        _, *words = values(["dflash", *argv], known_only=True)
    except (flags.Error, ValueError) as error:
        raise errors.ConfigError(" ".join(str(error).split())) from None
    end = words.index("--") if "--" in words else len(words)
    unknown = [
        _unknown_flag(subcommand, word, words[index + 1 : end], values)
        for index, word in enumerate(words[:end])
        if word.startswith("-") and word != "-"
    ]
    if unknown:
        raise errors.ConfigError(*unknown)
    return words[:end] + words[end + 1 :]


def _unknown_flag(
    subcommand: Subcommand, argument: str, later: Sequence[str], values: flags.FlagValues
) -> str:
    """Returns why a flag is unknown, and the config key or the flag that was meant.

    Args:
      later: Words after the flag, of which the first may be its value.
    """
    flag, equals, value = argument.partition("=")
    name = flag.lstrip("-")
    if name in JOIN_FLAGS:
        divide = "; divide it with --shard" if "shard" in subcommand.shared else ""
        return f"{flag}: dflash {subcommand.name} runs in one process{divide}"
    if not equals and later and not later[0].startswith("-") and "=" not in later[0]:
        value = later[0]
    key = name if "." in flag else _key(subcommand, name.replace("-", "_"))
    if key is not None:
        return f"unknown flag {flag}; config keys take no dashes: {key}={value}"
    known = {f"--{known}" for known in values if len(known) > 1}
    return f"unknown flag {flag}{registry.suggest(flag, known)}"


def _key(subcommand: Subcommand, name: str) -> str | None:
    """Returns the shortest dotted key of the subcommand's configs that ends with a name."""
    kinds = subcommand.schema if isinstance(subcommand.schema, tuple) else (subcommand.schema,)
    paths = (path for kind in filter(None, kinds) for path in loader.known_keys(kind, None))
    return min((".".join(path) for path in paths if path[-1] == name), key=len, default=None)
