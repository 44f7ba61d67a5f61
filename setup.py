"""Packaging; tool settings live in pyproject.toml."""

import pathlib
import re

import setuptools

ROOT = pathlib.Path(__file__).parent


def read_version() -> str:
    """Reads `__version__` without importing the package, whose dependencies may be absent."""
    text = (ROOT / "dflash" / "__init__.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE).group(1)


def read_long_description() -> str:
    readme = ROOT / "README.md"
    return readme.read_text(encoding="utf-8") if readme.exists() else ""


# Lower bounds only: the newest release that fits the user's Python and accelerator is the right
# one. On Python 3.11 pip settles on jax 0.10, on 3.12 and later on a newer one.
REQUIRES = [
    "absl-py>=2.1",
    "flax>=0.12",
    "jax>=0.10",
    "jinja2>=3.1",  # chat templates, those of the embedded models included
    "matplotlib>=3.9",  # plots and heat maps
    "ml-collections>=1.0",
    "numpy>=2.0",
    "optax>=0.2.6",
    "orbax-checkpoint>=0.11",
    "pyyaml>=6.0",
    "rich>=13.7",  # progress bars and tables; flax needs it anyway
    "safetensors>=0.5",
    "sentencepiece>=0.2",
    "pyarrow>=17.0",  # parquet files; tensorflow-datasets needs it anyway
    # Neither its import nor reading array_record files needs TensorFlow, so that is not listed.
    "tensorflow-datasets>=4.9.8",
    "tensorboardX>=2.6",  # writes TensorBoard's files; small, and needs no TensorFlow either
]

EXTRAS = {
    "test": [
        "hypothesis>=6.100",
        "pytest>=8.0",
        "pytest-xdist>=3.6",
        "ruff>=0.17",
        "scipy>=1.13",
        "setuptools>=70.1",  # a test builds a wheel; Python 3.12 environments come without it
    ],
    "tpu": ["jax[tpu]>=0.10"],
    # Tokenizers and downloads; transformers itself is only a reference for tests.
    "hf": ["huggingface_hub>=0.30", "tokenizers>=0.21"],
    "parity": [
        # The tests need a CPU build and nothing new. With the upper bound, a CPU wheel of 2.13 in
        # the user's index or wheel directory wins over newer CUDA builds on PyPI; to be sure of
        # one, add --extra-index-url https://download.pytorch.org/whl/cpu.
        "torch>=2.6,<2.14",
        "transformers>=5.0",
    ],
}

setuptools.setup(
    name="dflash",
    version=read_version(),
    description="Lossless speculative decoding with block-diffusion drafters, in JAX",
    long_description=read_long_description(),
    long_description_content_type="text/markdown",
    author="The dflash authors",
    license="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=[
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    python_requires=">=3.11",
    install_requires=REQUIRES,
    extras_require=EXTRAS,
    # configs/ stands at the top of the repository, where people look for it, and is installed
    # inside the package, where the loader finds it from any directory.
    packages=[*setuptools.find_packages(include=["dflash", "dflash.*"]), "dflash.configs"],
    package_dir={"dflash.configs": "configs"},
    package_data={"dflash.configs": ["**/*.yml"], "dflash": ["assets/**/*", "measure/*.html"]},
    zip_safe=False,
)
