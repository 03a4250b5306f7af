"""Signs of life between the processes of a run, so that none waits for one that hangs.

Every process keeps a connection to process 0, over which both send a byte a second. Who hears
nothing for SILENCE_SECONDS, or finds the connection broken, ends the process by what it is given
for that: a thread of its own does, since the main thread may be in a collective that never returns.
Process 0 so notices any other, and its end is noticed by all others.
"""

import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 30.0
# What breaks a connection mostly breaks a collective too, and the main thread says more of it.
GRACE_SECONDS = 5.0
CONNECT_SECONDS = 20.0
BEAT, GOODBYE = b".", b"x"
TOKEN_BYTES = 16
INDEX_BYTES = 4

Lost = Callable[[str], object]  # what is done with a sentence about a process that is lost


class Heartbeats:
    """Connections to other processes, watched by threads of this one."""

    def __init__(self, connections: dict[int, socket.socket], lost: Lost) -> None:
        """Begins.

        Args:
          connections: by the number of the process.
          lost: called with a sentence where one is lost; it should not return.
        """
        self._connections, self._lost = connections, lost
        threading.Thread(target=self._beat, daemon=True).start()
        for pair in connections.items():
            threading.Thread(target=self._watch, args=pair, daemon=True).start()

    def say_goodbye(self) -> None:
        """Tells the others that this process ends, and that all is well."""
        _send(self._connections.values(), GOODBYE)

    def _beat(self) -> None:
        while True:
            _send(self._connections.values(), BEAT)
            time.sleep(BEAT_SECONDS)

    def _watch(self, index: int, connection: socket.socket) -> None:
        connection.settimeout(SILENCE_SECONDS)
        while True:
            try:
                received = connection.recv(64)
            except TimeoutError:
                self._lost(f"Process {index} gave no sign of life for {SILENCE_SECONDS:.0f} s")
                return
            except OSError:
                received = b""
            if GOODBYE in received:
                return
            if not received:
                time.sleep(GRACE_SECONDS)
                self._lost(f"Process {index} is gone")
                return


def _send(connections: Iterable[socket.socket], message: bytes) -> None:
    for connection in connections:
        try:
            connection.sendall(message)
        except OSError:  # who reads from it notices as well
            continue


class Listener:
    """On process 0, where the others connect to.

    Attributes:
      port: of it.
      token: that they have to know, as hexadecimal digits.
    """

    def __init__(self, host: str) -> None:
        """`host` is the address to listen at; empty for all of this machine's."""
        self._socket = socket.create_server((host, 0))
        self.port = int(self._socket.getsockname()[1])
        self.token = secrets.token_hex(TOKEN_BYTES)

    def accept(self, count: int) -> dict[int, socket.socket]:
        """The connections of `count` others, or of those that came in CONNECT_SECONDS."""
        deadline = time.monotonic() + CONNECT_SECONDS
        found: dict[int, socket.socket] = {}
        with self._socket:
            while len(found) < count and (left := deadline - time.monotonic()) > 0:
                self._socket.settimeout(left)
                try:
                    connection = self._socket.accept()[0]
                    connection.settimeout(BEAT_SECONDS)
                    greeting = connection.recv(TOKEN_BYTES + INDEX_BYTES, socket.MSG_WAITALL)
                except OSError:  # nobody came, or somebody who did not speak
                    continue
                if secrets.compare_digest(greeting[:TOKEN_BYTES], bytes.fromhex(self.token)):
                    found[int.from_bytes(greeting[TOKEN_BYTES:])] = connection
                else:
                    connection.close()
        return found


def connect(host: str, port: int, token: str, index: int) -> dict[int, socket.socket]:
    """The connection of process `index` to process 0; none where it cannot be reached."""
    try:
        connection = socket.create_connection((host, port), CONNECT_SECONDS)
        connection.sendall(bytes.fromhex(token) + index.to_bytes(INDEX_BYTES))
    except OSError:
        return {}
    return {0: connection}
