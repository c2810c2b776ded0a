"""TLS of a connection: which certificates are trusted and shown, and what a failed handshake means."""

import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from aether_common.errors import ConfigError

UNKNOWN_ISSUER = {18, 19, 20, 21}
"""OpenSSL's verification codes: self-signed, or an issuer that is not trusted."""
NOT_YET_VALID, EXPIRED = 9, 10
OTHER_NAME = {62, 64}


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files, by the keys of the settings table that names them. The host's name is always verified."""

    ca_file: Path | None = None
    certificate: Path | None = None
    private_key: Path | None = None
    table: str = "tls"

    def context(self) -> ssl.SSLContext:
        """Raises `ConfigError` that names key and file."""
        for key in ("ca_file", "certificate", "private_key"):
            path: Path | None = getattr(self, key)
            try:
                if path is not None:
                    path.read_bytes()
            except OSError as error:
                raise ConfigError(f"{self.table}.{key} = '{path}' cannot be read: {error.strerror}") from error
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
        except ssl.SSLError as error:
            raise ConfigError(f"{self.table}.ca_file = '{self.ca_file}' holds no PEM certificate") from error
        if self.certificate is not None:
            try:
                # Without a password OpenSSL would ask for one at the terminal.
                context.load_cert_chain(self.certificate, self.private_key, password="")
            except (ssl.SSLError, ValueError) as error:
                reason = "they do not belong together" if "MISMATCH" in str(error) else "no unencrypted PEM pair"
                raise ConfigError(
                    f"{self.table}.certificate = '{self.certificate}' and {self.table}.private_key = "
                    f"'{self.private_key}' cannot be used: {reason} ({error})"
                ) from error
        return context


def explain(error: BaseException, url: str, tls: Tls) -> str | None:
    """What is wrong with TLS or the WebSocket at `url`, and what to do; None for a failure that may pass by itself."""
    host = urlsplit(url).hostname
    for cause in _causes(error):
        match cause:
            case aiohttp.ClientError() if not isinstance(cause, aiohttp.WSServerHandshakeError):
                pass  # Some are an `SSLError` in name only; what they wrap comes next.
            case ssl.SSLCertVerificationError():
                return _certificate(cause, host, tls)
            case ssl.SSLError():
                return _handshake(cause, tls)
            case aiohttp.WSServerHandshakeError():
                return _upgrade(cause.status, url)
            case _:
                pass
    return None


def _certificate(error: ssl.SSLCertVerificationError, host: str | None, tls: Tls) -> str:
    code = error.verify_code
    if code in UNKNOWN_ISSUER:
        if tls.ca_file is None:
            return (
                "its certificate comes from no authority that this system trusts: for a private authority set "
                f"{tls.table}.ca_file to its certificate (ca.pem)"
            )
        return f"its certificate comes from another authority than that of {tls.table}.ca_file = '{tls.ca_file}'"
    if code in OTHER_NAME:
        return (
            f"its certificate is for another name than {host!r}: use a name of the certificate in the url, or have "
            f"one made for {host!r}"
        )
    if code == EXPIRED:
        return "its certificate has expired: renew it on the server (if it has not, this machine's clock is wrong)"
    if code == NOT_YET_VALID:
        return "its certificate is not valid yet: check the clocks of both machines"
    return f"its certificate is not accepted: {error.verify_message}"


def _handshake(error: ssl.SSLError, tls: Tls) -> str | None:
    text = f"{error.reason} {error}".upper().replace(" ", "_")
    if "CERTIFICATE_REQUIRED" in text:
        return f"it demands a client certificate: set {tls.table}.certificate and {tls.table}.private_key"
    if any(
        alert in text for alert in ("ALERT_UNKNOWN_CA", "ALERT_BAD_CERTIFICATE", "ALERT_CERTIFICATE", "ALERT_DECRYPT")
    ):
        # Servers before TLS 1.3 answer a missing certificate with the same alert.
        if tls.certificate is None:
            return f"it demands a client certificate: set {tls.table}.certificate and {tls.table}.private_key"
        return f"it refuses the client certificate {tls.table}.certificate = '{tls.certificate}'"
    if any(
        sign in text for sign in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "UNKNOWN_PROTOCOL")
    ):
        return "it does not speak TLS at that port: check the port, or the server's configuration"
    return None


def _upgrade(status: int, url: str) -> str:
    if status == 400 and urlsplit(url).scheme == "ws":
        return "it does not accept a plain WebSocket (HTTP 400): is it a TLS port (wss://)?"
    if status in (401, 403, 407):
        return f"it answers HTTP {status} instead of opening a WebSocket: the proxy wants other [headers]"
    return f"it answers HTTP {status} instead of opening a WebSocket: check host, port and path"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error, what it wraps, and what it came from."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        cause = waiting.pop(0)
        if not isinstance(cause, BaseException) or id(cause) in seen:
            continue
        seen.add(id(cause))
        yield cause
        wrapped = (getattr(cause, name, None) for name in ("certificate_error", "os_error"))
        waiting += [*wrapped, cause.__cause__, cause.__context__]
