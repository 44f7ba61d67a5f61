"""Signed frames between two processes: a value with arrays, none of it pickled.

Both processes have the same secret in their environment (DFLASH_RUN_SECRET), which signs every
frame together with its number, so that frames are neither forged, nor repeated, nor reordered.
Arrays travel as raw bytes; zeros at their ends are left out.
"""

import contextlib
import hmac
import math
import os
import queue
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from dflash import errors
from dflash.parallel import messages
from dflash.parallel.agreement import SECRET

_HELLO = b"dflash\x00\x01"  # The last byte is the version of the frames.
_NONCE_BYTES = 16
_LENGTHS = struct.Struct("<QQ")  # Bytes of the value, and of the arrays.
_MOST_VALUE_BYTES = 2**26
_SIGNATURE_BYTES = 32
_HANDSHAKE_S = 10.0
_KEEPALIVE_S = 10
_LAST_FRAMES_S = 1.0  # Time to send what was posted before the end.


class Channel:
    """Connection to another process, which one thread receives from and others post to."""

    def __init__(self, connection: socket.socket, *, accepts: bool):
        """Exchanges greetings; closes the connection if that fails.

        Args:
          connection: Connected socket.
          accepts: Whether this process has accepted the connection, and not opened it.
        Raises:
          UserError: The other process does not speak this protocol.
          OSError: The connection is lost.
        """
        self._socket, self._closed = connection, threading.Event()
        self._outbox: queue.SimpleQueue[tuple[Any, Sequence[Any]] | None]
        self._outbox = queue.SimpleQueue()
        self._sender: threading.Thread | None = None
        try:
            _keep_alive(connection)
            connection.settimeout(_HANDSHAKE_S)
            own = os.urandom(_NONCE_BYTES)
            connection.sendall(_HELLO + own)
            hello = bytes(self._read(len(_HELLO) + _NONCE_BYTES))
            connection.settimeout(None)
        except OSError:
            self.close()
            raise
        if hello[: len(_HELLO)] != _HELLO:
            self.close()
            raise errors.UserError(
                "the other process is not a server of dflash, or of another version"
            )
        nonces = [own, hello[len(_HELLO) :]]
        secret = os.environ.get(SECRET, "").encode()
        key = hmac.digest(secret, b"".join(reversed(nonces) if accepts else nonces), "sha256")
        # The two directions have keys of their own.
        keys = [hmac.digest(key, name, "sha256") for name in (b"opened", b"accepted")]
        self._send_key, self._receive_key = reversed(keys) if accepts else keys
        self._num_sent = self._num_received = 0
        self._sender = threading.Thread(target=self._send_posted, name="frames", daemon=True)
        self._sender.start()

    def post(self, value: Any, arrays: Sequence[Any] = ()) -> None:
        """Sends a frame from a thread; does not block, and does nothing once the channel is closed.

        Args:
          value: Value that `messages.encode` accepts.
          arrays: Arrays that belong to it, of numpy or jax.
        """
        if not self._closed.is_set():
            self._outbox.put((value, arrays))

    def receive(
        self, types: Sequence[type] = (), *, most_bytes: int = 0
    ) -> tuple[Any, list[np.ndarray]]:
        """Waits for a frame and returns its value and arrays.

        Args:
          types: Dataclasses that the value may contain.
          most_bytes: Largest size of its arrays together.
        Raises:
          UserError: The frame is not signed with this process's secret, or cannot be decoded.
          OSError: The connection is lost.
        """
        lengths = bytes(self._read(_LENGTHS.size))
        of_value, of_arrays = _LENGTHS.unpack(lengths)
        if of_value > _MOST_VALUE_BYTES or of_arrays > most_bytes:
            raise errors.UserError(
                f"a frame of {of_value} + {of_arrays} bytes, expected at most "
                f"{_MOST_VALUE_BYTES} + {most_bytes}"
            )
        value, body = self._read(of_value), self._read(of_arrays)
        signature = bytes(self._read(_SIGNATURE_BYTES))
        own = _sign(self._receive_key, self._num_received, lengths, value, [body])
        if not hmac.compare_digest(signature, own):
            raise errors.UserError(
                f"a frame is not signed with this process's secret; set the same {SECRET} for both"
            )
        self._num_received += 1
        try:
            header = messages.decode(bytes(value), types)
            return header["value"], _unpack(header["arrays"], body, most_bytes)
        except (ValueError, TypeError, LookupError) as error:
            raise errors.UserError(
                f"a frame cannot be decoded: {error}; start both processes with the same version "
                "of dflash"
            ) from error

    def close(self) -> None:
        """Closes the connection after what was posted; a thread in `receive` gets an OSError."""
        self._closed.set()
        self._outbox.put(None)
        if self._sender not in (None, threading.current_thread()):
            self._sender.join(_LAST_FRAMES_S)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _send_posted(self) -> None:
        try:
            while (frame := self._outbox.get()) is not None:
                self._send(*frame)
        except OSError:
            self.close()

    def _send(self, value: Any, arrays: Sequence[Any]) -> None:
        arrays = [np.asarray(array) for array in arrays]
        boxes = [np.ascontiguousarray(_without_end(array)) for array in arrays]
        specs = [
            (array.dtype.name, array.shape, box.shape)
            for array, box in zip(arrays, boxes, strict=True)
        ]
        header = messages.encode({"value": value, "arrays": specs})
        parts = [box.reshape(-1).view(np.uint8).data for box in boxes]
        lengths = _LENGTHS.pack(len(header), sum(len(part) for part in parts))
        signature = _sign(self._send_key, self._num_sent, lengths, header, parts)
        self._num_sent += 1
        for part in (lengths + header, *parts, signature):
            self._socket.sendall(part)

    def _read(self, count: int) -> bytearray:
        content = bytearray(count)
        view, done = memoryview(content), 0
        while done < count:
            read = self._socket.recv_into(view[done:])
            if not read:
                raise ConnectionResetError("the other process has closed the connection")
            done += read
        return content


def check_exposed(host: str, flag: str) -> None:
    """Raises if a process would talk to other machines without a secret.

    Args:
      host: Host of this process or of the other one.
      flag: Name of the flag or key that gave it.
    Raises:
      ConfigError: The host is another one than this machine, and there is no secret.
    """
    if os.environ.get(SECRET) or host == "localhost" or host.startswith("127.") or host == "::1":
        return
    raise errors.ConfigError(
        f"{flag}: {host} is not this machine alone; set the environment variable {SECRET} to the "
        "same value for both servers, so that they know each other"
    )


def _keep_alive(connection: socket.socket) -> None:
    """Makes the loss of the other machine known within half a minute."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL"):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), _KEEPALIVE_S)


def _sign(key: bytes, number: int, lengths: bytes, value: Any, parts: Sequence[Any]) -> bytes:
    signer = hmac.new(key, number.to_bytes(8, "little") + lengths, "sha256")
    for part in (value, *parts):
        signer.update(part)
    return signer.digest()


def _without_end(array: np.ndarray) -> np.ndarray:
    """Returns the smallest box at the array's beginning outside which everything is zero."""
    present = array != 0
    for axis in range(array.ndim):
        others = tuple(i for i in range(array.ndim) if i != axis)
        filled = np.flatnonzero(present.any(axis=others))
        size = int(filled[-1]) + 1 if filled.size else 0
        cut = (*[slice(None)] * axis, slice(0, size))
        array, present = array[cut], present[cut]
    return array


def _unpack(specs: Sequence[Sequence[Any]], body: bytearray, most_bytes: int) -> list[np.ndarray]:
    """Returns the arrays of a frame; raises ValueError if they are not those of the specs."""
    arrays, start, left = [], 0, most_bytes
    for name, shape, box in specs:
        dtype, count = jnp.dtype(name), math.prod(box)
        left -= math.prod(shape) * dtype.itemsize
        if left < 0 or not all(0 <= a <= b for a, b in zip(box, shape, strict=True)):
            raise ValueError(f"an array of shape {tuple(shape)} and box {tuple(box)}")
        read = np.frombuffer(body, dtype, count, start).reshape(box)
        start += count * dtype.itemsize
        if tuple(box) == tuple(shape):
            arrays.append(read)
            continue
        whole = np.zeros(shape, dtype)
        whole[tuple(slice(0, size) for size in box)] = read
        arrays.append(whole)
    if start != len(body):
        raise ValueError(f"{len(body)} bytes of arrays, expected {start}")
    return arrays
