"""The list of packages; everything else about the project is in pyproject.toml."""

import setuptools

# configs/ is at the top of the repository, where people look for it, and is installed inside the
# package, where the loader finds it from any directory.
setuptools.setup(
    packages=[*setuptools.find_packages(include=["dflash", "dflash.*"]), "dflash.configs"]
)
