"""SIGTERM and SIGINT end a run between two steps, so that its state can be saved first."""

import signal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignal:
    """Records SIGTERM and SIGINT while it is open; a second one of a kind acts as usual.

    Several processes must stop after the same step. So each step carries what every process has
    received, and all stop once they have read it: the step is dispatched, and read later, as the
    step's metrics are. A signal to one process thus ends all of them within two steps.

    Attributes:
      received: the signal that asks this process to stop, of several processes once all know of it.
    """

    def __init__(self):
        self.received: signal.Signals | None = None
        self._own = 0  # number of the signal to this process; 0 for none
        self._before = {}

    def __enter__(self):
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._receive)
        devices = Mesh(np.array(jax.devices()), ("device",))
        self._each = NamedSharding(devices, PartitionSpec("device"))
        self._largest = jax.jit(jnp.max, out_shardings=NamedSharding(devices, PartitionSpec()))
        return self

    def __exit__(self, *unused):
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def exit_status(self) -> int:
        """128 + the number of the signal, as in shells; 0 if there was none."""
        return 0 if self.received is None else 128 + self.received

    def tell(self) -> jax.Array | None:
        """Tells all processes, with the next step, what this one has received; None for one alone.

        All processes call it at the same step.

        Returns:
          int32 scalar for `hear`; it is computed while the caller goes on.
        """
        if jax.process_count() == 1:
            return None
        own = np.full(1, self._own, np.int32)
        shape = (jax.device_count(),)
        return self._largest(jax.make_array_from_callback(shape, self._each, lambda _: own))

    def hear(self, told: jax.Array | None) -> None:
        """Takes what a call of `tell` has brought; waits for it."""
        number = 0 if told is None else int(told)
        if number:
            self.received = signal.Signals(number)

    def _receive(self, number: int, frame) -> None:
        self._own = number
        if jax.process_count() == 1:
            self.received = signal.Signals(number)
        signal.signal(number, self._before[number])
