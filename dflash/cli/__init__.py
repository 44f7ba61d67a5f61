"""Flags, help, exit statuses and preflight checks of all commands."""

import runpy


def main() -> None:
    """Runs the `dflash` command, for a console script of the distribution `dflash`.

    That distribution, which is Z-Lab's, may be installed over this one. Its script then imports
    `main` from here, since this package comes before its module `cli`; so `dflash doctor` runs and
    names the clash.
    """
    runpy.run_module("dflash", run_name="__main__")
