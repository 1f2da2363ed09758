"""Find the certificate authorities of this host, so that our requests, uv and build steps trust the same bundle."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from pathlib import Path, PurePath

from minisandbox.errors import HostError

VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
"""Environment variables that name a bundle of certificates, in order of precedence."""
# Bundles of Debian, RHEL, openSUSE, RHEL 7 and Alpine, and related systems, as in Go's crypto/x509/root_linux.go.
SYSTEM = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
_PROGRAMS = (*VARIABLES, "PIP_CERT", "GIT_SSL_CAINFO", "NODE_EXTRA_CA_CERTS", "CARGO_HTTP_CAINFO")


def bundle(environment: Mapping[str, str] | None = None) -> Path | None:
    """Return the bundle that a variable of :data:`VARIABLES` names, or the system's bundle; None if both are missing.

    Without such a variable, uv, requests and Node use bundles of their own, which lack a company's private authority.

    Args:
        environment: environment variables; those of the process by default.
    """
    env = os.environ if environment is None else environment
    paths = (*filter(None, map(env.get, VARIABLES)), *SYSTEM)
    return next((path for path in map(Path, paths) if path.is_file()), None)


def context() -> ssl.SSLContext:
    """Return a TLS context that trusts :func:`bundle` and the certificates that OpenSSL trusts by default.

    Raises:
        HostError: the bundle is malformed.
    """
    path = bundle()
    try:
        tls_context = ssl.create_default_context()
        if path is not None and str(path) != ssl.get_default_verify_paths().cafile:
            tls_context.load_verify_locations(path)
    except ssl.SSLError as error:
        hint = f"name a file of PEM certificates in {VARIABLES[0]}"
        raise HostError(f"cannot read the certificates in {path}", reason=str(error), hint=hint) from None
    return tls_context


def variables(path: PurePath) -> dict[str, str]:
    """Return the environment variables that make uv, pip, curl, git, npm and cargo trust a bundle."""
    return dict.fromkeys(_PROGRAMS, str(path))


def export() -> None:
    """Set the environment variables that make the Hugging Face libraries in this process trust the bundle."""
    if (path := bundle()) is not None:
        for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"):
            os.environ.setdefault(name, str(path))
