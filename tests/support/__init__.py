"""What several tests share: models, meshes, golden vectors, cases, and processes to start."""

import pathlib

SUPPORT = pathlib.Path(__file__).parent
TESTS = SUPPORT.parent
