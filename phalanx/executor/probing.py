"""Whether two nodes reach each other: each opens a door, and each knocks at all the others' before anything is loaded.

The key of a door depends on the node behind it, so that an address which many machines have (a container bridge's, say)
and which leads back to the caller is not taken for the node that was meant.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Mapping, Sequence

from phalanx.distributed.transports.abort import Abort, GroupBroken
from phalanx.distributed.transports.secure_stream import SecureStream, Unauthenticated
from phalanx.errors import ConfigError
from phalanx.executor.doorkeeper import Doorkeeper
from phalanx.executor.interfaces import listen, shown
from phalanx.executor.keys import derive
from phalanx.executor.node_messages import Target, Unreachable

CONNECT_S = 5.0
_CALLERS = 256
"""More than there are other nodes, which all call at the same time and only once."""


class ProbeDoor:
    """Open from now until `close`. Its key may come later; callers wait for it."""

    def __init__(self, node: int, host: str, session_key: bytes | None = None):
        """Raises ConfigError when `host` is not an address of this node."""
        self._node, self._never = node, Abort()
        self._listener = listen(host, 0, "PHALANX_HOST_IP")
        self.port = int(self._listener.getsockname()[1])
        self._doorkeeper: Doorkeeper | None = None
        if session_key is not None:
            self.open(session_key)

    def open(self, session_key: bytes) -> None:
        key = derive(session_key, "probe", str(self._node))

        def greet(sock: socket.socket, _address: str) -> None:
            stream = SecureStream(sock, self._never, "a caller")
            with contextlib.suppress(GroupBroken):
                stream.handshake(key, client=False, encrypt=False, timeout=CONNECT_S)

        self._doorkeeper = Doorkeeper(self._listener, greet, "probe", _CALLERS)

    def close(self) -> None:
        if self._doorkeeper is not None:
            self._doorkeeper.close()
        else:
            self._listener.close()


def probe_all(targets: Sequence[Target], session_key: bytes) -> list[Unreachable]:
    """Knock at all targets at the same time; those that did not answer, and why. Takes a few seconds at most."""
    failures: list[Unreachable] = []
    threads = [threading.Thread(target=_probe, args=(t, session_key, failures), daemon=True) for t in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * CONNECT_S)
    return sorted(failures, key=lambda failure: failure.node)


def broken_pairs(
    failures: Mapping[int, Sequence[Unreachable]], targets: Mapping[int, Target], names: Mapping[int, str]
) -> ConfigError | None:
    """Each pair of nodes that fails, in one error; None when there is none. By node: its failures, where it was knocked
    at, and its name."""
    pairs = [
        f"{names[one]} cannot reach {names[failed.node]} at "
        f"{shown(targets[failed.node].host, targets[failed.node].port)}: {failed.reason}"
        for one, failed_ones in failures.items()
        for failed in failed_ones
    ]
    if not pairs:
        return None
    text = "; ".join(pairs)
    blamed = ", ".join(names[n] for n in sorted({f.node for failed_ones in failures.values() for f in failed_ones}))
    return ConfigError(
        f"{text[:1].upper()}{text[1:]}.",
        fix=f"Open the ports between these nodes in the firewall, or set PHALANX_HOST_IP on {blamed} to an address "
        "that the other nodes reach.",
    )


def _probe(target: Target, session_key: bytes, failures: list[Unreachable]) -> None:
    begin, never = time.monotonic(), Abort()
    try:
        sock = socket.create_connection((target.host, target.port), timeout=CONNECT_S)
    except TimeoutError:
        failures.append(Unreachable(target.node, f"no answer within {CONNECT_S:g} s"))
        return
    except OSError as error:
        failures.append(Unreachable(target.node, error.strerror or str(error)))
        return
    stream = SecureStream(sock, never, "the node")
    try:
        left = max(0.5, CONNECT_S - (time.monotonic() - begin))
        stream.handshake(derive(session_key, "probe", str(target.node)), client=True, encrypt=False, timeout=left)
    except (Unauthenticated, GroupBroken):
        failures.append(Unreachable(target.node, "something else answers there"))
    finally:
        stream.close()
        never.close()
