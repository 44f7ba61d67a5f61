import dataclasses
import json
import pickle

import numpy as np
import pytest

from dflash import errors
from dflash.parallel import agreement, distributed, jax_internals, messages
from dflash.text.prompts import Prompt


@dataclasses.dataclass(frozen=True)
class Other:
    name: str = ""


class Payload:
    """Runs code when it is unpickled."""

    ran = False

    def __reduce__(self):
        return (setattr, (Payload, "ran", True))


class Store:
    """Key-value store of a coordination service in which process 1 has signed a message."""

    def __init__(self, message: bytes):
        self._message, self._own = message, b""

    def key_value_increment(self, key, increment):
        return 1

    def key_value_set_bytes(self, key, value):
        self._own = value

    def wait_at_barrier(self, name, timeout_ms):
        pass

    def blocking_key_value_get_bytes(self, key, timeout_ms):
        return agreement._signed(key, self._message) if key.endswith("/1") else self._own


@pytest.fixture
def two_processes(monkeypatch):
    """Makes this process the first of two; the second one's message is the argument."""

    def start(message: bytes):
        monkeypatch.setattr(agreement.jax, "process_count", lambda: 2)
        service = jax_internals.Coordination(Store(message), process=0, num_processes=2)
        monkeypatch.setattr(jax_internals, "coordination", lambda: service)

    monkeypatch.setattr(Payload, "ran", False)
    return start


@pytest.mark.parametrize(
    "value",
    [
        None,
        [True, -3, 2.5, float("inf"), "a\udc80"],
        ((1, 2), [()], {"a": {"tuple": (1,)}}),
        Prompt(3, (1, 2), messages=({"role": "user", "content": "hi"},), later_turns=("b",)),
    ],
)
def test_values_arrive_as_they_were_sent(value):
    assert messages.decode(messages.encode(value), [Prompt, Other]) == value


def test_numpy_scalars_become_numbers():
    assert messages.decode(messages.encode([np.int64(3), np.float32(0.5)])) == [3, 0.5]


@pytest.mark.parametrize("value", [b"x", {1: 2}, {1}, Prompt, object()])
def test_other_values_cannot_be_sent(value):
    with pytest.raises(TypeError, match="cannot be sent"):
        messages.encode(value)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (pickle.dumps(1), "utf-8"),
        (b"nonsense", "Expecting value"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"map": {}, "tuple": []}', "an object with 2 keys, expected 1"),
        (b'{"map": []}', "the content of 'map' is not an object"),
        (b'{"Prompt": {}}', "'Prompt' is not among the expected types"),
        (b'{"Other": {}}', "'Other': fields are missing or unknown: name"),
        (b'{"Other": {"name": "", "x": 1}}', "'Other': fields are missing or unknown: x"),
    ],
)
def test_a_message_of_another_form_is_an_error(message, reason):
    with pytest.raises(ValueError, match=reason):
        messages.decode(message, [Other])


def test_gather_returns_the_values_in_the_order_of_processes(two_processes):
    two_processes(json.dumps({"tuple": [2]}).encode())
    assert agreement.gather("sizes", (1,)) == [(1,), (2,)]


def test_gather_runs_no_pickled_code(two_processes):
    two_processes(pickle.dumps(Payload()))
    with pytest.raises(
        errors.UserError, match=r"^process 1: its message 'sizes' cannot be decoded"
    ):
        agreement.gather("sizes", 1)
    assert not Payload.ran


def test_broadcast_runs_no_pickled_code(monkeypatch):
    from jax.experimental import multihost_utils

    payload = pickle.dumps(Payload())
    message = np.zeros(distributed._MESSAGE_BYTES, np.uint8)
    head = len(payload).to_bytes(distributed._SIZE_BYTES, "little") + payload
    message[: len(head)] = np.frombuffer(head, np.uint8)
    monkeypatch.setattr(distributed.jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", lambda own: message)
    monkeypatch.setattr(Payload, "ran", False)
    with pytest.raises(errors.UserError, match=r"^process 0: its broadcast cannot be decoded"):
        distributed.broadcast([1])
    assert not Payload.ran
