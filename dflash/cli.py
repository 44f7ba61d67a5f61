"""Shared by all entry points: flags, the config, and exit statuses.

    python -m dflash.decode CONFIG [key=value ...] [--flags]

Flags say where and how a run happens; the config holds everything that can change a number. Flags
are defined in an object of their own, so importing this module defines nothing globally.
"""

import dataclasses
import os
import sys
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

from absl import flags

from dflash import errors, registry
from dflash.config import loader

_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
_BROKEN_PIPE = 141  # 128 + SIGPIPE
_USAGE_ERROR = 2


@dataclasses.dataclass(frozen=True)
class Command:
    """A parsed command line.

    Attributes:
      config: the resolved config, an instance of the entry point's schema.
      config_hash: hash of the resolved config.
      config_path: path of the config file.
      workdir: directory for results; None for terminal only.
      dry_run: whether to print the plan only, allocating nothing.
      profile_dir: directory for a profiler trace, or None.
      coordinator_address, num_processes, process_id: see `distributed.initialize`.
      stream: whether to print text as it is accepted.
      flags: values of the entry point's own flags, by name.
    """

    config: Any
    config_hash: str
    config_path: str
    workdir: str | None
    dry_run: bool
    profile_dir: str | None
    coordinator_address: str | None
    num_processes: int | None
    process_id: int | None
    stream: bool
    flags: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def run(
    main: Callable[[Command], int | None],
    *,
    name: str,
    description: str,
    schema: type | None = None,
    load: Callable[[str, Sequence[str]], Any] | None = None,
    define_flags: Callable[[flags.FlagValues], None] = lambda values: None,
    argv: Sequence[str] | None = None,
) -> NoReturn:
    """Runs an entry point and exits with its status.

    Args:
      main: does the work; returns an exit status, None for 0.
      name: the module as `python -m` takes it, such as "dflash.decode".
      description: one or two sentences for `--help`.
      schema: the dataclass that the config fills.
      load: reads a config and its overrides, instead of `loader.load` with a schema.
      define_flags: adds the entry point's own flags.
      argv: arguments without the program name; None for those of the process.
    Raises:
      SystemExit: always, with the status of `status_of`; 2 for wrong usage.
    """
    argv = sys.argv[1:] if argv is None else argv
    load = load or (lambda path, overrides: loader.load(path, overrides, schema))
    sys.exit(status_of(lambda: _run(main, name, load, define_flags, description, argv)))


def status_of(work: Callable[[], int | None]) -> int:
    """Calls `work` and returns the exit status; prints a UserError as lines on stderr.

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
        return _INTERRUPTED
    except BrokenPipeError:
        # Python flushes stdout once more at exit; that must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    return status


def parse_arguments(
    values: flags.FlagValues, argv: Sequence[str], names: Sequence[str], usage: str
) -> list[str]:
    """Parses the command line of an entry point that reads no config.

    Args:
      values: the command's own flags; --help is added.
      argv: arguments without the program name; flags may be anywhere.
      names: names of the positional arguments.
      usage: goes with every problem.
    Returns:
      The positional arguments; after --help there may be any number.
    Raises:
      ConfigError: wrong usage.
    """
    flags.DEFINE_bool("help", False, "Print how to use this.", short_name="h", flag_values=values)
    try:
        positional = _parse(values, argv)
    except errors.ConfigError as error:
        raise errors.ConfigError(*(f"{problem}; {usage}" for problem in error.problems)) from error
    if not values.help and len(positional) != len(names):
        problem = f"expected {' and '.join(names)}, not {len(positional)} arguments"
        raise errors.ConfigError(f"{problem}; {usage}")
    return positional


def _run(main, name: str, load, define_flags, description: str, argv: Sequence[str]) -> int:
    values = _define_flags()
    common = set(values)
    define_flags(values)
    positional = _parse(values, argv)
    if values.help or values.helpfull:
        print(_help(values, name, description, set(values) - common))
        return 0
    if not positional or "=" in positional[0]:
        print(f"usage: {_usage(name)}; see --help", file=sys.stderr)
        return _USAGE_ERROR
    path, *overrides = positional
    config = load(path, overrides)
    if values.print_config:
        print(loader.to_yaml(config), end="")
        return 0
    shared = {field.name for field in dataclasses.fields(Command)} & common
    from dflash.runs import compilation_cache  # imports jax, after the config has been found good

    compilation_cache.enable(values.compilation_cache)
    command = Command(
        config=config,
        config_hash=loader.config_hash(config),
        config_path=str(loader.find_config(path)),
        flags={flag: values[flag].value for flag in set(values) - common},
        **{flag: values[flag].value for flag in shared},
    )
    return main(command) or 0


def _define_flags() -> flags.FlagValues:
    values = flags.FlagValues()
    where = {"flag_values": values}
    flags.DEFINE_string("workdir", None, "Directory for results; made if missing.", **where)
    flags.DEFINE_bool("dry_run", False, "Print the plan without allocating anything.", **where)
    flags.DEFINE_bool(
        "print_config", False, "Print the resolved config, every key of it, as YAML.", **where
    )
    flags.DEFINE_string("profile_dir", None, "Directory for a profiler trace.", **where)
    flags.DEFINE_string(
        "coordinator_address",
        None,
        "Several processes: host:port of process 0, or auto on TPU pods and known clusters.",
        **where,
    )
    flags.DEFINE_integer(
        "num_processes", None, "Several processes: how many.", lower_bound=1, **where
    )
    flags.DEFINE_integer(
        "process_id", None, "Several processes: which one this is, from 0.", lower_bound=0, **where
    )
    flags.DEFINE_bool("stream", True, "Print text as it is accepted.", **where)
    flags.DEFINE_string(
        "compilation_cache",
        None,
        "Directory for compiled programs, or off; default: ~/.cache/dflash/programs.",
        **where,
    )
    flags.DEFINE_bool("help", False, "Print this text.", short_name="h", **where)
    flags.DEFINE_bool("helpfull", False, "The same.", **where)
    return values


def _parse(values: flags.FlagValues, argv: Sequence[str]) -> list[str]:
    """Fills `values` and returns the positional arguments; flags may be anywhere.

    Raises:
      ConfigError: unknown flags, each on a line of its own, or a flag's value is unusable.
    """
    values.set_gnu_getopt(True)
    try:
        _, *rest = values(["dflash", *argv], known_only=True)
    except (flags.Error, ValueError) as error:
        raise errors.ConfigError(" ".join(str(error).split())) from None
    end = rest.index("--") if "--" in rest else len(rest)
    unknown = [argument for argument in rest[:end] if argument.startswith("-") and argument != "-"]
    if unknown:
        raise errors.ConfigError(*(_unknown_flag(argument, values) for argument in unknown))
    return rest[:end] + rest[end + 1 :]


def _unknown_flag(argument: str, values: flags.FlagValues) -> str:
    flag, equals, value = argument.partition("=")
    if "." in flag:
        key = flag.lstrip("-")
        return f"unknown flag {flag}; config keys take no dashes: {key}{equals or '='}{value}"
    known = {f"--{known}" for known in values if len(known) > 1}
    return f"unknown flag {flag}{registry.suggest(flag, known)}"


def _usage(name: str) -> str:
    return f"python -m {name} CONFIG [key=value ...] [--flags]"


def _help(values: flags.FlagValues, name: str, description: str, added: Collection[str]) -> str:
    own = values.flags_by_module_dict()[_define_flags.__module__]
    entries = []
    for flag in (*own, *(values[name] for name in sorted(added))):
        label = f"--[no]{flag.name}" if flag.boolean and flag.default else f"--{flag.name}"
        entries.append(f"  {label:<24}{flag.help}")
    return "\n".join(
        [
            textwrap.fill(description, 100),
            "",
            f"usage: {_usage(name)}",
            "",
            "CONFIG is a YAML file, looked up as given, then among the shipped ones. Arguments of",
            "the form key=value override it, with dots in the key and YAML in the value:",
            f"  python -m {name} configs/qwen3_4b_dflash.yml decode.temperature=0.8 mesh.tensor=2",
            "All keys with their values: add --print_config.",
            "",
            "flags, anywhere on the line:",
            *entries,
        ]
    )
