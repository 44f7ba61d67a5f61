"""Signals that ask a run to end: heard between steps, so that the state can be saved first."""

import signal

import jax
import numpy as np

_HEARD = (signal.SIGTERM, signal.SIGINT)


class StopSignal:
    """Listens for SIGTERM and SIGINT while open; a second one of them acts at once."""

    def __init__(self):
        self.received: signal.Signals | None = None
        self._before = {}

    def __enter__(self):
        for number in _HEARD:
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *unused):
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def exit_status(self) -> int:
        """128 + the number of the signal, as shells report it; 0 if there was none."""
        return 0 if self.received is None else 128 + self.received

    def agreed(self) -> bool:
        """Whether to stop here: all processes ask this at the same step and hear the same."""
        if jax.process_count() > 1:
            from jax.experimental import multihost_utils

            heard = multihost_utils.process_allgather(np.int32(self.received or 0))
            if heard.max():
                self.received = signal.Signals(int(heard.max()))
        return self.received is not None

    def _receive(self, number: int, frame) -> None:
        self.received = signal.Signals(number)
        signal.signal(number, self._before[number])
