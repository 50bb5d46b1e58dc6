"""Connecting to an abstract Unix socket."""

import socket


def connect(name: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(10)
    sock.connect(f"\0{name}")
    return sock
