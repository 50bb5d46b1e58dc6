"""Which address node 0 listens on."""

from __future__ import annotations

import socket

import pytest

from phalanx.errors import ConfigError
from phalanx.executor.interfaces import address_of_node_0, checked, listen, shown
from tests.helpers.hosts import Host


def test_numbers_are_taken_as_they_are() -> None:
    assert address_of_node_0("127.0.0.1", None) == "127.0.0.1"
    assert address_of_node_0("fd00:0::1", None) == "fd00::1"
    assert address_of_node_0("localhost", None) in ("127.0.0.1", "::1")
    assert address_of_node_0("10.1.2.3", "127.0.0.1") == "127.0.0.1", "PHALANX_HOST_IP wins"


def test_a_name_that_means_loopback_is_not_used(two_hosts: list[Host], monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian gives a machine's own name 127.0.1.1. The resolver is the one thing replaced here."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: [(2, 1, 6, "", ("127.0.1.1", 0))])
    with two_hosts[0].network(), pytest.raises(ConfigError, match=r"means 127\.0\.1\.1 .* no default route"):
        address_of_node_0("host0", None)


@pytest.mark.parametrize("address", ["0.0.0.0", "::"])
def test_never_every_interface(address: str) -> None:
    with pytest.raises(ConfigError, match="every network"):
        address_of_node_0(address, None)
    with pytest.raises(ConfigError, match="every network"):
        checked(address, "PHALANX_HOST_IP")


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="not an IP address"):
        checked("eth0", "PHALANX_HOST_IP")
    with pytest.raises(
        ConfigError, match=r"PHALANX_HOST_IP is 192\.0\.2\.1, which is not an address of this node"
    ) as own:
        checked("192.0.2.1", "PHALANX_HOST_IP")
    assert "--master-addr" not in own.value.fix
    with pytest.raises(
        ConfigError, match=r"--master-addr is 192\.0\.2\.1, which is not an address of this node"
    ) as other:
        listen("192.0.2.1", 0, "--master-addr")
    assert "PHALANX_HOST_IP" in other.value.fix
    with pytest.raises(ConfigError, match="unknown on this node"):
        address_of_node_0("no-such-host.invalid", None)
    taken = listen("127.0.0.1", 0, "--master-addr")
    with taken, pytest.raises(ConfigError, match="in use by another program"):
        listen("127.0.0.1", taken.getsockname()[1], "--master-addr")


def test_shown() -> None:
    assert shown("10.0.0.1", 5) == "10.0.0.1:5"
    assert shown("fd00::1", 5) == "[fd00::1]:5"
