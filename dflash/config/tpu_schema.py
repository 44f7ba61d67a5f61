"""Schema of `dflash compile`: a decoding or training config with a TPU and a budget."""

import dataclasses
from typing import Literal

from dflash.config import schema, train_schema
from dflash.config.schema import option


@dataclasses.dataclass(frozen=True)
class TpuConfig:
    """TPU to compile for, and budget of the run."""

    topology: str | None = None  # Such as v5p:2x2x1, v5e:2x2 or v5p-8.
    slices: int = option(1, minimum=1)  # Slices on the data center network; they split mesh.data.
    context: int | None = option(None, minimum=1)  # Tokens before each block; None: as many as fit.
    only: Literal["all", "cycle", "prefill", "train step"] = "all"  # Programs to compile.
    max_hbm_gb: float | None = option(None, minimum=0.0)  # Budget per chip, in 10⁹ bytes.
    max_cycle_ms: float | None = option(None, minimum=0.0)  # Budget for the estimated cycle time.


@dataclasses.dataclass(frozen=True)
class CompileDecode(schema.DecodeRun):
    """Decoding config with the TPU to compile it for."""

    tpu: TpuConfig = dataclasses.field(default_factory=TpuConfig)


@dataclasses.dataclass(frozen=True)
class CompileTrain(train_schema.TrainRun):
    """Training config with the TPU to compile it for."""

    tpu: TpuConfig = dataclasses.field(default_factory=TpuConfig)
