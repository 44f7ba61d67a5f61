"""Name and version of the distribution, in a module that all others can import."""

__version__ = "0.1.0"
# The name that pip knows. The distribution `dflash` on PyPI is another project, Z-Lab's.
DISTRIBUTION = "dflash-jax"


def install_command(extra: str) -> str:
    """Returns the shell command that installs what an extra needs.

    pip takes the requirements from the installed distribution, so the command also works where no
    index has the distribution.
    """
    return f"pip install '{DISTRIBUTION}[{extra}]'"
