"""Certificates of a private authority: what `--self-signed` writes, and what a certificate file says.

The authority is made once for a directory and signs nothing but its server's certificate. Workers trust
`ca.pem`; a new server certificate from the same authority needs no change on their side.
"""

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from aether_common.bus import check_host, in_url
from aether_common.errors import ConfigError
from aether_common.files import write_durably
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY, AUTHORITY_KEY = "ca.pem", "ca.key"
SERVER, SERVER_KEY = "server.pem", "server.key"
LOCAL_NAMES = ("localhost", "127.0.0.1")
"""In every server certificate, so that a program on the same machine can connect too."""
AUTHORITY_DAYS = 3650
SERVER_DAYS = 825
RENEW_DAYS = 60
"""A server certificate with less time left than this is made again when its server is prepared."""
CLOCK_SKEW = timedelta(hours=1)


def make_authority(directory: Path, run: str) -> None:
    """Write `ca.pem` and `ca.key`; the key stays on this host."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(f"Aether RL run {run}")
    now = datetime.now(UTC)
    certificate = (
        _builder(name, name, key, x509.BasicConstraints(ca=True, path_length=0), {"key_cert_sign", "crl_sign"})
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + timedelta(days=AUTHORITY_DAYS))
        .sign(key, hashes.SHA256())
    )
    _write_pair(directory / AUTHORITY_KEY, key, directory / AUTHORITY, certificate)


def issue(directory: Path, hosts: Sequence[str], days: int = SERVER_DAYS) -> None:
    """Write `server.pem` and `server.key` for `hosts` and this machine, signed by the authority in `directory`.

    Raises `ConfigError` when there is no usable authority.
    """
    authority = read_certificate(directory / AUTHORITY)
    authority_key = _read_key(directory / AUTHORITY_KEY)
    key = ec.generate_private_key(ec.SECP256R1())
    names = with_local(hosts)
    now = datetime.now(UTC)
    server = x509.BasicConstraints(ca=False, path_length=None)
    certificate = (
        _builder(_name(names[0][:64]), authority.subject, key, server, {"digital_signature"})
        .not_valid_before(now + timedelta(days=min(days, 0)) - CLOCK_SKEW)
        .not_valid_after(min(now + timedelta(days=days), authority.not_valid_after_utc))
        .add_extension(x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    _write_pair(directory / SERVER_KEY, key, directory / SERVER, certificate)


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    constraints: x509.BasicConstraints,
    usages: set[str],
) -> x509.CertificateBuilder:
    """What every certificate has; `usages` are the key's, all others are excluded."""
    every = (
        *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
        *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
    )
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .add_extension(constraints, critical=True)
        .add_extension(x509.KeyUsage(**{usage: usage in usages for usage in every}), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def prepare(directory: Path, run: str, hosts: Sequence[str]) -> None:
    """Make what is missing: the authority once, the server's certificate also for other names or near its end."""
    if not (directory / AUTHORITY).is_file() or not (directory / AUTHORITY_KEY).is_file():
        make_authority(directory, run)
    elif (directory / SERVER).is_file() and (directory / SERVER_KEY).is_file():
        server = read_certificate(directory / SERVER)
        left = server.not_valid_after_utc - datetime.now(UTC)
        if names_of(server) == with_local(hosts) and left > timedelta(days=RENEW_DAYS):
            return
    issue(directory, hosts)


def with_local(hosts: Sequence[str]) -> list[str]:
    """The names of a server's certificate: the given ones in their order, then this machine's."""
    return list(dict.fromkeys([*(check_host(host) for host in hosts), *LOCAL_NAMES]))


def read_certificate(path: Path) -> x509.Certificate:
    """The first certificate in a PEM file. Raises `ConfigError`."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: certificate cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: is no PEM certificate") from error


def names_of(certificate: x509.Certificate) -> list[str]:
    """The host names and addresses that a certificate is good for."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in names if isinstance(name, x509.DNSName | x509.IPAddress)]


def first_name(path: Path) -> str:
    """The host that workers dial to reach a server with this certificate. Raises `ConfigError`."""
    for name in names_of(read_certificate(path)):
        if "*" not in name:
            return name
    raise ConfigError(f"{path}: names no single host: set nats.public_url to the URL that workers dial")


def websocket_url(host: str, port: int = 443) -> str:
    """The URL that workers dial; HTTPS's port is left out."""
    return f"wss://{in_url(host)}" + (f":{port}" if port != 443 else "")


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except OSError as error:
        raise ConfigError(f"{path}: key of the authority cannot be read: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path}: is no private key: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{path}: was not made by aether-coordinator")
    return key


def _write_pair(
    key_file: Path, key: ec.EllipticCurvePrivateKey, certificate_file: Path, certificate: x509.Certificate
) -> None:
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    write_durably(key_file, private, mode=0o600)
    write_durably(certificate_file, certificate.public_bytes(serialization.Encoding.PEM), mode=0o600)
