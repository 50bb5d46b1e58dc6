"""The socket that a server listens on, and its TLS."""

from __future__ import annotations

import errno
import socket
import ssl

from phalanx.config import ServerConfig
from phalanx.errors import ConfigError

BACKLOG = 2048
MOST_SERVERS = 64


def check(server: ServerConfig) -> None:
    """What no machine could serve with. Raises ConfigError."""
    for name, low, high in (("port", 0, 65535), ("api_server_count", 1, MOST_SERVERS)):
        if not low <= (value := getattr(server, name)) <= high:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be between {low} and {high}.")
    if server.router and server.router_listen:
        raise ConfigError(
            "--router and --router-listen exclude each other: engines run on one side or the other.",
            fix="Give --router-listen where the engines are, --router on other machines.",
        )
    if not server.request_timeout > 0:
        raise ConfigError(f"--request-timeout is {server.request_timeout:g}; it must be above 0.")
    if not server.shutdown_timeout >= 0:
        raise ConfigError(f"--shutdown-timeout is {server.shutdown_timeout:g}; it must be 0 or more.")
    if not server.sse_keep_alive_interval >= 0:
        raise ConfigError(f"--sse-keep-alive-interval is {server.sse_keep_alive_interval:g}; it must be 0 or more.")
    if any(not key or key != key.strip() or not key.isprintable() for key in server.api_key):
        # an empty one is what --api-key "$KEY" gives where KEY is not set, and clients without a key would fit it
        raise ConfigError(
            "An --api-key is empty, or has white space around it or control characters in it.",
            fix="Give a key that clients can send in a header, or leave --api-key out to let everyone in.",
        )
    if not server.host.strip():
        raise ConfigError("--host is empty.", fix="Use 127.0.0.1, or 0.0.0.0 to open the server to the network.")


def bind(server: ServerConfig) -> socket.socket:
    """A listening socket. Raises ConfigError."""
    try:
        found = socket.getaddrinfo(server.host, server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
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
