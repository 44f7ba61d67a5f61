"""Declaration of a subcommand: arguments, config, flags and help.

Each subcommand has its own `FlagValues`, so that importing this module defines no global flags.
"""

import dataclasses
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from absl import flags

_WIDTH = 80  # Columns of the help.
_LABEL_WIDTH = 24
CONFIG = "CONFIG"
_ABOUT_CONFIGS = (
    "CONFIG is a YAML file, or a Python file whose get_config() returns an "
    "ml_collections.ConfigDict, looked up as given, then among the shipped configs. Arguments of "
    "the form key=value override it; keys are dotted, and values are YAML. --print_config shows "
    "all keys with their values. Models named hf:org/name need pip install 'dflash-jax[hf]'."
)
_STATUSES = (
    "exit status: 0: done; 1: the run failed; 2: invalid usage, config, input or checkpoint; 130: "
    "interrupted"
)
JOIN_FLAGS = ("coordinator_address", "num_processes", "process_id")
RUN_FLAGS = (
    *("workdir", "dry_run", "print_config", "profile_dir"),
    *(*JOIN_FLAGS, "compilation_cache"),
)


@dataclasses.dataclass(frozen=True)
class Subcommand:
    """Declaration of a subcommand, for its command line and help.

    Attributes:
      arguments: Names of the positional arguments; key=value may follow CONFIG.
      schema: Dataclass that the config fills, or several to choose from.
      load: Reads the config from its path and the overrides, in place of `schema`.
      configs: Returns the configs of the runs within the loaded object.
      shared: Names of the shared flags that the subcommand takes.
      overrides: Returns the key=value arguments that its own flags stand for.
      cpu_only: The subcommand never needs an accelerator.
      statuses: Exit statuses beside the usual ones, for the help.
    """

    name: str
    description: str
    examples: tuple[str, ...] = ()
    arguments: tuple[str, ...] = (CONFIG,)
    schema: type | tuple[type, ...] | None = None
    load: Callable[[str, Sequence[str]], Any] | None = None
    configs: Callable[[Any], Iterable[Any]] = lambda loaded: (loaded,)
    shared: tuple[str, ...] = ()
    define_flags: Callable[[flags.FlagValues], None] = lambda values: None
    overrides: Callable[[flags.FlagValues], list[str]] = lambda values: []
    cpu_only: bool = False
    statuses: str = ""

    @property
    def takes_config(self) -> bool:
        """Returns whether the first argument is a config."""
        return self.arguments == (CONFIG,)

    @property
    def usage(self) -> str:
        """Returns the usage as one line."""
        overrides = ["[key=value ...]"] if self.takes_config else []
        return " ".join(["dflash", self.name, *self.arguments, *overrides, "[--flags]"])

    def flag_values(self) -> flags.FlagValues:
        """Returns the unparsed flags, shared ones and its own."""
        values = _define_shared()
        for name in set(values) - set(self.shared):
            delattr(values, name)
        self.define_flags(values)
        flags.DEFINE_bool("help", False, "Print this text.", short_name="h", flag_values=values)
        return values


def _define_shared() -> flags.FlagValues:
    values = flags.FlagValues()
    where = {"flag_values": values}
    flags.DEFINE_string("workdir", None, "Directory for results; created if missing.", **where)
    flags.DEFINE_bool("dry_run", False, "Print the plan without allocating anything.", **where)
    flags.DEFINE_bool(
        "print_config", False, "Print the resolved config, with all keys, as YAML.", **where
    )
    flags.DEFINE_string("profile_dir", None, "Directory for a profiler trace.", **where)
    flags.DEFINE_string(
        "coordinator_address",
        None,
        "host:port of process 0 of a multi-process run, or auto on TPU pods and known clusters.",
        **where,
    )
    flags.DEFINE_integer(
        "num_processes", None, "Number of processes of a multi-process run.", lower_bound=1, **where
    )
    flags.DEFINE_integer(
        "process_id",
        None,
        "Index of this process of a multi-process run, from 0.",
        lower_bound=0,
        **where,
    )
    flags.DEFINE_string(
        "shard",
        None,
        "Do only shard i of n, given as i/n with i from 0, in a --workdir that all shards share; "
        "auto reads i and n from a Kubernetes Job or a Slurm array.",
        **where,
    )
    flags.DEFINE_bool("stream", True, "Print text as it is accepted.", **where)
    flags.DEFINE_string(
        "compilation_cache",
        None,
        "Directory for compiled programs, or off; default: ~/.cache/dflash/programs.",
        **where,
    )
    return values


def help_text(subcommand: Subcommand, values: flags.FlagValues) -> str:
    """Returns the text of --help."""

    def filled(text: str) -> str:
        return textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)

    parts = [filled(subcommand.description), "", f"usage: {subcommand.usage}"]
    if subcommand.takes_config:
        parts += ["", filled(_ABOUT_CONFIGS)]
    parts += ["", "flags, anywhere on the line:", *_flag_lines(values)]
    if subcommand.examples:
        parts += ["", "examples:", *(f"  {line}" for line in subcommand.examples)]
    statuses = "; ".join(filter(None, [_STATUSES, subcommand.statuses]))
    return "\n".join([*parts, "", filled(statuses)])


def _flag_lines(values: flags.FlagValues) -> list[str]:
    lines = []
    for group in values.flags_by_module_dict().values():
        for flag in group:
            label = f"--[no]{flag.name}" if flag.boolean and flag.default else f"--{flag.name}"
            begin = f"  {label}".ljust(_LABEL_WIDTH)
            later = " " * _LABEL_WIDTH
            lines += textwrap.wrap(
                flag.help, _WIDTH, initial_indent=f"{begin}", subsequent_indent=later
            )
    return lines
