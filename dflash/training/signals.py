"""Handling of SIGTERM and SIGINT: the run stops between two steps and saves its state."""

import signal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignal:
    """Context manager that records SIGTERM and SIGINT; a second signal acts as without it.

    Several processes must stop after the same step. Each step therefore all-reduces (max) the
    number of the signal that a process has received, and every process reads the result together
    with the step's metrics. A signal to one process ends all of them within two steps.

    Attributes:
      received: Signal that stops this process. With several processes, it is set only once all of
        them know of it.
    """

    def __init__(self):
        self.received: signal.Signals | None = None
        self._own = 0  # Number of the signal that this process has received; 0 for none.
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
        """Exit status as shells report it, 128 + the signal's number; 0 without a signal."""
        return 0 if self.received is None else 128 + self.received

    def all_reduce(self) -> jax.Array | None:
        """Dispatches the all-reduce of the received signals; all processes call it at each step.

        Returns:
          Argument for `record`, int32 [], not waited for; None for a single process.
        """
        if jax.process_count() == 1:
            return None
        own = np.full(1, self._own, np.int32)
        shape = (jax.device_count(),)
        return self._largest(jax.make_array_from_callback(shape, self._each, lambda _: own))

    def record(self, signals: jax.Array | None) -> None:
        """Waits for the result of `all_reduce`, and records the signal if there is one."""
        number = 0 if signals is None else int(signals)
        if number:
            self.received = signal.Signals(number)

    def _receive(self, number: int, frame) -> None:
        self._own = number
        if jax.process_count() == 1:
            self.received = signal.Signals(number)
        signal.signal(number, self._before[number])
