"""What `dflash compile` reads in addition to a run's config: the TPU and a budget."""

import dataclasses
from typing import Literal

from dflash.config import schema, train_schema
from dflash.config.schema import option


@dataclasses.dataclass(frozen=True)
class TpuConfig:
    """The TPU to compile for, and the budget of the run."""

    topology: str | None = None  # chip and shape, such as v5p:2x2x1, v5e:2x2 or v6e:16x16
    slices: int = option(1, minimum=1)  # connected by the data center network; they split mesh.data
    context: int | None = option(None, minimum=1)  # tokens before each block; None: as many as fit
    only: Literal["all", "cycle", "prefill", "train step"] = "all"  # which programs to compile
    max_hbm_gb: float | None = option(None, minimum=0.0)  # per chip, in 10⁹ bytes
    max_cycle_ms: float | None = option(None, minimum=0.0)  # estimated time of a decode cycle


@dataclasses.dataclass(frozen=True)
class CompileDecode(schema.DecodeRun):
    """A decoding config and the TPU to compile it for."""

    tpu: TpuConfig = dataclasses.field(default_factory=TpuConfig)


@dataclasses.dataclass(frozen=True)
class CompileTrain(train_schema.TrainRun):
    """A training config and the TPU to compile it for."""

    tpu: TpuConfig = dataclasses.field(default_factory=TpuConfig)
