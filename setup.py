"""Builds with the shipped configs; everything else about the project is in pyproject.toml."""

import setuptools
from setuptools.command.build_py import build_py


class BuildWithConfigs(build_py):
    """Puts configs/ into the package, where the loader finds it from any directory.

    It is at the top of the repository, where people look for it. An editable install reads it
    there, and must not map it: then Python would look packages up by a hook that any directory
    named dflash in the working directory comes before.
    """

    def run(self):
        super().run()
        if not self.editable_mode:
            self.copy_tree("configs", f"{self.build_lib}/dflash/configs")


setuptools.setup(
    packages=setuptools.find_packages(include=["dflash", "dflash.*"]),
    cmdclass={"build_py": BuildWithConfigs},
)
