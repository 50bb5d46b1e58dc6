"""The socket that a server listens on, and its TLS."""

from __future__ import annotations

import errno
import socket
import ssl

from phalanx.config import ServerConfig
from phalanx.errors import ConfigError

BACKLOG = 2048


def bind(server: ServerConfig) -> socket.socket:
    """A listening socket. Raises ConfigError."""
    if not 0 <= server.port <= 65535:
        raise ConfigError(f"--port is {server.port}; it must be between 0 and 65535.")
    try:
        found = socket.getaddrinfo(server.host or None, server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        fix = "Give --host an address of this machine."
        raise ConfigError(f"The address '{server.host}' is unknown.", fix=fix) from None
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _bind_failure(server, error) from None
    return listener


def _bind_failure(server: ServerConfig, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"Port {server.port} on {server.host} is in use by another program.",
            fix="Choose another with --port (0 takes a free one).",
        )
    if error.errno == errno.EACCES:
        return ConfigError(f"Port {server.port} needs more rights.", fix="Choose a --port from 1024 on.")
    if error.errno == errno.EADDRNOTAVAIL:
        return ConfigError(f"{server.host} is not an address of this machine.", fix="Give another --host.")
    return ConfigError(f"Cannot listen on {server.host}, port {server.port}: {error.strerror}.")


def tls_context(server: ServerConfig) -> ssl.SSLContext | None:
    """None without TLS. Raises ConfigError."""
    if not (server.ssl_certfile or server.ssl_keyfile or server.ssl_ca_certs):
        return None
    if not (server.ssl_certfile and server.ssl_keyfile):
        raise ConfigError("TLS needs a key and a certificate.", fix="Give both --ssl-keyfile and --ssl-certfile.")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

    def no_password() -> str:
        raise ConfigError("The TLS key is encrypted.", fix="Give an unencrypted --ssl-keyfile that only you can read.")

    try:
        context.load_cert_chain(server.ssl_certfile, server.ssl_keyfile, password=no_password)
        if server.ssl_ca_certs:
            context.load_verify_locations(server.ssl_ca_certs)
            context.verify_mode = ssl.CERT_REQUIRED
    except ssl.SSLError as error:
        why = error.reason or "not PEM"
        raise ConfigError(f"The TLS files cannot be used: {why}.", fix="They must be PEM files that fit.") from None
    except OSError as error:
        raise ConfigError(f"The TLS files cannot be read: {error.strerror}.", fix="Check the --ssl-… paths.") from None
    return context
