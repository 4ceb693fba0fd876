"""Why a TLS connection failed.

librdkafka says only that a certificate "could not be verified". After it has refused a connection,
this makes one handshake with Python's own TLS, under the same properties, to learn the reason. No
secret is sent.
"""

import os
import socket
import ssl
from collections.abc import Mapping
from contextlib import suppress

PROBE_SECONDS = 2.0

_HAS_EXPIRED = 10
"""X509_V_ERR_CERT_HAS_EXPIRED of OpenSSL; the other numbers below are its as well."""

_TLS_PROTOCOLS = ("ssl", "sasl_ssl")
_OWN = ("ssl.certificate.location", "ssl.certificate.pem", "ssl.keystore.location")
_OFF = ("false", "f", "0")
_ALERTS = ("CERTIFICATE", "UNKNOWN_CA")
"""In the names of what a server says about its client's certificate."""


def uses_tls(properties: Mapping[str, str]) -> bool:
    """Whether these properties ask for TLS."""
    return properties.get("security.protocol", "plaintext").lower() in _TLS_PROTOCOLS


def tls_problem(servers: str, properties: Mapping[str, str]) -> str | None:
    """What is wrong with TLS at the first address of `servers` that answers; None if nothing is
    found. Takes `PROBE_SECONDS` per address at most."""
    try:
        context = _context(properties)
    except (OSError, ValueError) as error:
        return f"certificates of the properties cannot be loaded: {_plain(error)}"
    for host, port in _addresses(servers):
        try:
            with socket.create_connection((host, port), timeout=PROBE_SECONDS) as connection:
                return _handshake(context, connection, host, properties)
        except OSError:
            continue
    return None


def speaks_tls(servers: str) -> bool:
    """Whether the first address of `servers` that answers makes a TLS handshake with anybody."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    for host, port in _addresses(servers):
        with suppress(OSError), socket.create_connection((host, port), PROBE_SECONDS) as connection:
            with suppress(OSError), context.wrap_socket(connection, server_hostname=host):
                return True
            return False
    return False


def _handshake(
    context: ssl.SSLContext, connection: socket.socket, host: str, properties: Mapping[str, str]
) -> str | None:
    try:
        with context.wrap_socket(connection, server_hostname=host) as secure:
            # TLS 1.3: what the other side thinks of our certificate comes after the handshake
            secure.settimeout(0.3)
            with suppress(TimeoutError):
                secure.recv(1)
            return None
    except ssl.SSLCertVerificationError as error:
        return _verification(error, host)
    except ssl.SSLError as error:
        reason = error.reason or ""
        if "ALERT" in reason and any(name in reason for name in _ALERTS):
            return _refused_certificate(properties, reason)
        if "WRONG_VERSION_NUMBER" in reason:
            return "this port does not speak TLS"
        return None
    except OSError:
        return None


def _verification(error: ssl.SSLCertVerificationError, host: str) -> str:
    reason = error.verify_message.rstrip(".")
    match error.verify_code:
        case 10:
            return "the broker's certificate has expired"
        case 9:
            return "the broker's certificate is not valid yet: check both clocks"
        case 62 | 64:
            return f"the broker's certificate is for another host than {host} ({reason})"
        case 2 | 18 | 19 | 20 | 21:
            return (
                f"no authority in ssl.ca.location has signed the broker's certificate ({reason}): "
                "its certificate authority is unknown here"
            )
    return f"the broker's certificate cannot be verified: {reason}"


def _refused_certificate(properties: Mapping[str, str], reason: str) -> str | None:
    if not any(name in properties for name in _OWN):
        return (
            "the cluster wants a certificate of this client, which has none "
            "(ssl.certificate.location and ssl.key.location)"
        )
    own = _own_files(properties)
    if own is None:
        return None  # it was not shown
    if "EXPIRED" in reason or _expired(*own, properties):
        return f"this client's certificate has expired ({own[0]})"
    reason = reason.lower().replace("_", " ")
    return (
        f"the cluster refuses this client's certificate: who signed it is unknown there ({reason})"
    )


def _expired(certificate: str, key: str, properties: Mapping[str, str]) -> bool:
    """Whether a certificate is past its time: a handshake with itself, in memory."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load(server, certificate, key, properties)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.load_verify_locations(certificate)
    client.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(back, there, server_side=False),
        server.wrap_bio(there, back, server_side=True),
    )
    for _ in range(4):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                return error.verify_code == _HAS_EXPIRED
            except ssl.SSLError:
                return False
    return False


def _own_files(properties: Mapping[str, str]) -> tuple[str, str] | None:
    """This client's certificate and key, if both lie in files of PEM: Python loads no others."""
    certificate = properties.get("ssl.certificate.location")
    key = properties.get("ssl.key.location")
    return None if certificate is None or key is None else (certificate, key)


def _load(
    context: ssl.SSLContext, certificate: str, key: str, properties: Mapping[str, str]
) -> None:
    context.load_cert_chain(certificate, key, lambda: properties.get("ssl.key.password", ""))


def _context(properties: Mapping[str, str]) -> ssl.SSLContext:
    location = properties.get("ssl.ca.location")
    if location == "probe":
        location = None
    directory = location is not None and os.path.isdir(location)
    context = ssl.create_default_context(
        cafile=None if directory else location,
        capath=location if directory else None,
        cadata=properties.get("ssl.ca.pem"),
    )
    if properties.get("ssl.endpoint.identification.algorithm", "https").lower() == "none":
        context.check_hostname = False
    if properties.get("enable.ssl.certificate.verification", "true").lower() in _OFF:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    own = _own_files(properties)
    if own is not None:
        _load(context, *own, properties)
    return context


def _plain(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)


def _addresses(servers: str) -> list[tuple[str, int]]:
    found = []
    for part in servers.split(","):
        host, _, port = part.strip().rpartition(":")
        if host and port.isdecimal():
            found.append((host.rpartition("/")[2].strip("[]"), int(port)))
    return found
