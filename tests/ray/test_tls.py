"""Ray's own TLS on three hosts: Phalanx joins such a cluster with the variables that Ray knows, and without them is
told so; Ray's port speaks nothing else.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.certificates import Authority
from tests.helpers.hosts import missing
from tests.helpers.one_request import PROMPT
from tests.helpers.plans import GREEDY
from tests.helpers.ray_hosts import RayHosts, ray_hosts

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing() or "there are hosts")]

ADDRESSES = ("10.77.0.10", "10.77.0.11", "10.77.0.12")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"), "authority")


@pytest.fixture(scope="module")
def files(authority: Authority) -> tuple[Path, Path]:
    """Certificate and key of all hosts."""
    return authority.issue("nodes", *ADDRESSES)


@pytest.fixture(scope="module")
def bed(authority: Authority, files: tuple[Path, Path]) -> Iterator[RayHosts]:
    certificate, key = files
    tls = {"RAY_USE_TLS": "1", "RAY_TLS_SERVER_CERT": str(certificate), "RAY_TLS_SERVER_KEY": str(key)}
    with ray_hosts((0, 1, 1), **tls, RAY_TLS_CA_CERT=str(authority.certificate)) as made:
        assert tuple(host.address for host in made.hosts) == ADDRESSES
        yield made


def test_ranks_compute_on_a_cluster_with_tls(bed: RayHosts, model: Path, reference) -> None:
    with bed.executor(model, tensor_parallel_size=2, placement_strategy="SPREAD", encrypt_transport=True) as ranks:
        assert sorted(status["node"] for status in ranks.ready()) == ["host1", "host2"]  # they are alike
        assert ranks.ask("generate") == reference.generate(PROMPT, 10, GREEDY)
        assert ranks.ask("close") == []


def test_its_port_takes_tls_with_a_certificate_of_the_authority_and_nothing_else(
    bed: RayHosts, authority: Authority, files: tuple[Path, Path], tmp_path: Path
) -> None:
    def speaks(context: ssl.SSLContext | None) -> bool:
        """Whether it answers HTTP/2's greeting with HTTP/2's settings."""
        with bed.hosts[0].network():
            plain = socket.create_connection((ADDRESSES[0], 6379), 5)
        plain.settimeout(5)
        try:
            with plain if context is None else context.wrap_socket(plain, server_hostname=ADDRESSES[0]) as connection:
                connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5))
                return connection.recv(9)[3:4] == b"\x04"
        except OSError:  # an SSLError is one
            return False

    def context(certificate: Path, key: Path) -> ssl.SSLContext:
        made = ssl.create_default_context(cafile=str(authority.certificate))
        made.set_alpn_protocols(["h2"])
        made.load_cert_chain(certificate, key)
        return made

    assert speaks(context(*files))
    assert not speaks(None)
    assert not speaks(context(*Authority(tmp_path, "stranger").issue("stranger", *ADDRESSES)))


def test_without_the_variables_it_is_said(bed: RayHosts, model: Path) -> None:
    began = time.monotonic()
    with bed.executor(model, tensor_parallel_size=2, env={"RAY_USE_TLS": "0"}) as ranks:
        answer = ranks.answer()
    assert answer["error"] == "ConfigError", answer
    assert f"The Ray cluster at {ADDRESSES[0]}:6379 wants TLS, and RAY_USE_TLS is not set here" in answer["text"]
    assert time.monotonic() - began < 30
