"""Settings of the package's tests that must stand before jax is imported, and their helpers."""

import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tests"))
from support import xla_flags

os.environ["XLA_FLAGS"] = xla_flags.quick(devices=8)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
