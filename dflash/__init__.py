"""Lossless speculative decoding with block-diffusion drafters, in JAX.

>>> import dflash
>>> llm = dflash.LLM("configs/tiny_dflash.yml")
>>> question = "Tom has 3 pens and finds 4 more. How many pens does Tom have?"
>>> for completion in llm.generate([question], dflash.Sampling(max_tokens=8)):
...     print(len(completion.token_ids), completion.finish_reason)
8 length

Everything is imported when it is first asked for: `import dflash` takes a few milliseconds, and jax
comes with the first model. Each command is a module whose `run` does what the command does:
`dflash.train.run("configs/train/dflash2.yml", "data.files=[a.jsonl]", workdir="runs/first")`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from dflash.version import __version__ as __version__

if TYPE_CHECKING:
    from dflash import benchmark as benchmark
    from dflash import compile as compile
    from dflash import convert as convert
    from dflash import errors as errors
    from dflash import train as train
    from dflash.llm import LLM as LLM
    from dflash.llm import Completion as Completion
    from dflash.llm import Piece as Piece
    from dflash.llm import Stream as Stream
    from dflash.sampling import Sampling as Sampling

_HOME, _CLASSES = "llm", ("LLM", "Completion", "Piece", "Sampling", "Stream")
_MODULES = ("benchmark", "compile", "convert", "errors", "train")
__all__ = [*_CLASSES, *_MODULES]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
