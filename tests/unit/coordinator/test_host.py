"""`nats init`: files, modes, refusals, and a nats-server that accepts what it writes."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from aether_common.errors import ConfigError
from aether_coordinator import certificates
from aether_coordinator.host import HostedServer, external_server, renew, server_of, write_host
from aether_coordinator.settings import ServerSettings
from nats_server import BINARY
from server_settings import SERVER

PRIVATE = {"ca.pem", "ca.key", "server.pem", "server.key"}
ALWAYS = {"nats-server.conf", "workers.conf", "coordinator.nk", "host.json"}


def accepted(server: HostedServer) -> bool:
    done = subprocess.run([BINARY, "-t", "-c", server.configuration], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return True


def block(server: HostedServer) -> str:
    found = re.search(r"websocket \{(.*?)\n\}", server.configuration.read_text(), re.DOTALL)
    assert found
    return found[1]


def test_self_signed(tmp_path: Path) -> None:
    server = write_host(
        tmp_path / "a" / "nats", "test", hosts=["Train.example.org", "10.1.2.3", "::1"], self_signed=True
    )
    assert accepted(server)
    files = {path.name: path.stat().st_mode & 0o777 for path in server.directory.iterdir()}
    assert files == dict.fromkeys(PRIVATE | ALWAYS, 0o600)
    assert server.directory.stat().st_mode & 0o777 == 0o700
    assert (server.url, server.websocket_url) == ("nats://127.0.0.1:4222", "wss://train.example.org:8443")
    assert server.ca_file == server.directory / "ca.pem"
    certificate = certificates.read_certificate(server.directory / "server.pem")
    assert certificates.names_of(certificate) == ["train.example.org", "10.1.2.3", "::1", "localhost", "127.0.0.1"]
    assert 'listen: "0.0.0.0:8443"' in block(server)
    assert f'cert_file: "{server.directory / "server.pem"}"' in block(server)
    steps = server.next_steps()
    assert f"nats-server -c {server.configuration}" in steps
    assert f'[nats]\n  directory = "{server.directory}"' in steps
    assert not server.reload()


def test_own_certificate_and_client_certificates(tmp_path: Path) -> None:
    certificates.make_authority(tmp_path, "x")
    certificates.issue(tmp_path, ["gpu.example.org"])
    pair = {"certificate": tmp_path / "server.pem", "private_key": tmp_path / "server.key"}
    server = write_host(tmp_path / "nats", "test", **pair, client_ca=tmp_path / "ca.pem", websocket_port=443)
    assert accepted(server)
    assert server.websocket_url == "wss://gpu.example.org"
    assert server.ca_file is None
    assert {path.name for path in server.directory.iterdir()} == ALWAYS
    assert accepted(write_host(tmp_path / "six", "test", **pair, listen="::1"))
    assert f'ca_file: "{tmp_path / "ca.pem"}"; verify: true' in block(server)
    named = write_host(tmp_path / "other", "test", **pair, hosts=["10.0.0.1"])
    assert named.websocket_url == "wss://10.0.0.1:8443"


def test_behind_a_proxy(tmp_path: Path) -> None:
    server = write_host(tmp_path, "test", hosts=["train.example.org"])
    assert accepted(server)
    assert server.websocket_url == "wss://train.example.org"
    assert 'listen: "127.0.0.1:8443"' in block(server)
    assert "no_tls: true" in block(server)
    assert write_host(tmp_path, "test", force=True).websocket_url == "ws://127.0.0.1:8443"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"self_signed": True}, "--self-signed needs --host"),
        ({"self_signed": True, "hosts": ["https://a.b"]}, "'https://a.b' is no host name and no IP address"),
        ({"self_signed": True, "hosts": ["a_b"]}, "'a_b' is no host name"),
        ({"listen": "0.0.0.0"}, "--listen 0.0.0.0 without TLS would let keys and jobs travel unencrypted"),
        ({"certificate": Path("c.pem")}, "--certificate and --private-key belong together"),
        ({"certificate": Path("/no/c"), "private_key": Path("/no/k")}, "--certificate /no/c: no such file"),
        ({"client_ca": Path("/no/c")}, "--client-ca needs TLS"),
        ({"run": "De.mo"}, "run 'De.mo': use 1 to 40"),
    ],
)
def test_refused_before_anything_is_written(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        write_host(tmp_path / "nats", **{"run": "test", **options})
    assert not (tmp_path / "nats").exists()


def test_nothing_is_overwritten_without_force(tmp_path: Path) -> None:
    (tmp_path / "ca.key").write_text("precious")
    with pytest.raises(ConfigError, match=rf"{tmp_path / 'ca.key'} exists: .*--force"):
        write_host(tmp_path, "test", hosts=["a.example"], self_signed=True)
    assert [path.name for path in tmp_path.iterdir()] == ["ca.key"]
    # Without --self-signed nobody needs that file.
    server = write_host(tmp_path, "test")
    key = server.key_file.read_bytes()
    with pytest.raises(ConfigError, match=r"nats-server\.conf exists"):
        write_host(tmp_path, "test")
    assert server.key_file.read_bytes() == key
    write_host(tmp_path, "test", force=True)
    assert server.key_file.read_bytes() != key
    assert (tmp_path / "ca.key").read_text() == "precious"


def test_renewal_keeps_the_authority(tmp_path: Path) -> None:
    server = write_host(tmp_path, "test", hosts=["a.example"], self_signed=True)
    authority, certificate = (tmp_path / "ca.pem").read_bytes(), (tmp_path / "server.pem").read_bytes()
    assert renew(tmp_path).websocket_url == server.websocket_url
    assert (tmp_path / "ca.pem").read_bytes() == authority
    assert (tmp_path / "server.pem").read_bytes() != certificate
    assert renew(tmp_path, ["b.example"]).websocket_url == "wss://b.example:8443"
    assert HostedServer(tmp_path).self_signed == ["b.example"]
    names = certificates.names_of(certificates.read_certificate(tmp_path / "server.pem"))
    assert names == ["b.example", "localhost", "127.0.0.1"]
    assert accepted(server)
    write_host(tmp_path, "test", force=True)
    with pytest.raises(ConfigError, match="was not made with --self-signed"):
        renew(tmp_path)


def test_an_embedded_servers_certificate_is_made_again_for_other_names_or_near_its_end(tmp_path: Path) -> None:
    def certificate(hosts: list[str]) -> bytes:
        certificates.prepare(tmp_path, "test", hosts)
        return (tmp_path / "server.pem").read_bytes()

    first = certificate(["a.example"])
    authority = (tmp_path / "ca.pem").read_bytes()
    assert certificate(["a.example"]) == first
    second = certificate(["a.example", "b.example"])
    assert second != first
    certificates.issue(tmp_path, ["a.example"], days=59)
    nearly = (tmp_path / "server.pem").read_bytes()
    assert certificate(["a.example"]) != nearly
    assert (tmp_path / "ca.pem").read_bytes() == authority


def settings(tmp_path: Path, *overrides: str) -> ServerSettings:
    file = tmp_path / "server.toml"
    file.write_text(SERVER)
    return ServerSettings.load(file, list(overrides))


def test_the_server_of_a_run(tmp_path: Path) -> None:
    made = write_host(tmp_path / "nats", "test", hosts=["a.example"], self_signed=True)
    run = settings(tmp_path, f"nats.directory={made.directory}")
    assert not run.nats.embedded
    server = server_of(run)
    assert isinstance(server, HostedServer)
    assert (server.workers, server.ca_file) == (made.directory / "workers.conf", made.directory / "ca.pem")
    assert server.websocket_url == "wss://a.example:8443"
    assert external_server(run) == ("nats://127.0.0.1:4222", made.key_file)
    proxied = server_of(settings(tmp_path, f"nats.directory={made.directory}", "nats.public_url=wss://p.example/run"))
    assert proxied is not None
    assert proxied.websocket_url == "wss://p.example/run"
    elsewhere = settings(tmp_path, "nats.url=tls://n.example:4222", "nats.key_file=c.nk")
    assert server_of(elsewhere) is None
    assert external_server(elsewhere) == ("tls://n.example:4222", tmp_path / "c.nk")
    with pytest.raises(
        ConfigError, match=r"nothing/host.json does not exist: make it with `aether-coordinator nats init"
    ):
        server_of(settings(tmp_path, "nats.directory=nothing"))
    write_host(tmp_path / "other", "another")
    with pytest.raises(ConfigError, match="is of run 'another', not 'test'"):
        server_of(settings(tmp_path, "nats.directory=other"))


def test_the_embedded_server_with_tls(tmp_path: Path) -> None:
    plain = server_of(settings(tmp_path, "nats.websocket_port=4443"))
    assert plain is not None
    assert (plain.websocket_url, plain.ca_file) == ("ws://127.0.0.1:4443", None)
    names = 'nats.self_signed=["a.example", "10.0.0.1"]'
    server = server_of(settings(tmp_path, names, "nats.websocket_host=0.0.0.0", "nats.websocket_port=4443"))
    assert server is not None
    assert (server.websocket_url, server.ca_file) == ("wss://a.example:4443", tmp_path / "run" / "nats" / "ca.pem")
    assert 'listen: "0.0.0.0:4443"' in server.configuration.read_text()
    pair = [
        f"nats.certificate={server.directory / 'server.pem'}",
        f"nats.private_key={server.directory / 'server.key'}",
    ]
    server = server_of(settings(tmp_path, *pair, "nats.websocket_port=4443"))
    assert server is not None
    assert (server.websocket_url, server.ca_file) == ("wss://a.example:4443", None)
    done = subprocess.run([BINARY, "-t", "-c", server.configuration], check=False)
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["nats.websocket_host=0.0.0.0"], "nats.websocket_host = '0.0.0.0' would let keys and jobs travel unencrypted"),
        (["nats.certificate=c.pem"], "nats.certificate and nats.private_key belong together"),
        (["nats.certificate=c.pem", "nats.private_key=k.pem"], "c.pem': no such file"),
        (['nats.self_signed=["a b"]'], "'a b' is no host name and no IP address"),
        (["nats.public_url=ws://a.example"], "accepted to loopback only: use wss"),
        (["nats.public_url=wss://u:p@a.example"], "no user and password in the url"),
        (["nats.ca_file=ca.pem"], "nats.ca_file belongs to an external server"),
        (["nats.directory=d", "nats.port=4222"], "nats.port belongs to the embedded server, but nats.directory names"),
        (
            ["nats.url=tls://a.b", "nats.key_file=k", 'nats.self_signed=["a"]'],
            "nats.self_signed belongs to the embedded",
        ),
    ],
)
def test_impossible_settings(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(tmp_path, *overrides)
    assert message in str(caught.value)
