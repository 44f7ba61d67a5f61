"""The only module that uses JAX's private API, so that a new JAX version can break only this one.

`jax._src.distributed.global_state` holds the client of JAX's coordination service, whose key-value
store and barriers need no device. JAX's public API (`jax.distributed`, `multihost_utils`) exchanges
values only through collectives on devices: these wait for running programs, cannot be entered
before devices exist, and hang when another process has failed.
"""

import dataclasses
from typing import Any

from jax._src import distributed


@dataclasses.dataclass(frozen=True)
class Coordination:
    """This process's access to JAX's coordination service.

    Attributes:
      client: Client of the key-value store and of barriers; None before the processes have joined.
      process: Index of this process. Unlike `jax.process_index()`, reading it initializes no
        devices.
    """

    client: Any
    process: int
    num_processes: int


def coordination() -> Coordination:
    """Returns the coordination service that `jax.distributed.initialize` has connected to."""
    state = distributed.global_state
    return Coordination(state.client, state.process_id, state.num_processes)
