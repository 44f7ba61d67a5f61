"""SIGTERM and SIGINT end a run between two steps, so that its state can be saved first."""

import signal

import jax
import numpy as np

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignal:
    """Records SIGTERM and SIGINT while it is open; a second one of a kind acts as usual."""

    def __init__(self):
        self.received: signal.Signals | None = None
        self._before = {}

    def __enter__(self):
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *unused):
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def exit_status(self) -> int:
        """128 + the number of the signal, as in shells; 0 if there was none."""
        return 0 if self.received is None else 128 + self.received

    def agreed(self) -> bool:
        """Whether to stop; all processes call this at the same step and get the same answer."""
        if jax.process_count() > 1:
            from jax.experimental import multihost_utils

            received = multihost_utils.process_allgather(np.int32(self.received or 0))
            if received.max():
                self.received = signal.Signals(int(received.max()))
        return self.received is not None

    def _receive(self, number: int, frame) -> None:
        self.received = signal.Signals(number)
        signal.signal(number, self._before[number])
