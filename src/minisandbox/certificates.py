"""The certificate authorities that every download trusts: our own requests, uv, and what build steps run."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from pathlib import Path, PurePath

from minisandbox.errors import HostError

VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
"""They name a bundle of certificates for this process, the first that is set before the others."""
# crypto/x509/root_linux.go of Go has the same list.
SYSTEM = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Ubuntu, Arch, Gentoo
    "/etc/pki/tls/certs/ca-bundle.crt",  # Fedora, RHEL
    "/etc/ssl/ca-bundle.pem",  # openSUSE
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",  # CentOS, RHEL 7
    "/etc/ssl/cert.pem",  # Alpine
)
_PROGRAMS = (*VARIABLES, "PIP_CERT", "GIT_SSL_CAINFO", "NODE_EXTRA_CA_CERTS", "CARGO_HTTP_CAINFO")


def bundle(environment: Mapping[str, str] | None = None) -> Path | None:
    """Return the bundle of trusted authorities: a variable's of :data:`VARIABLES`, else the system's, else None.

    uv, requests and Node bring authorities of their own and ignore the system's, which may have a company's.

    Args:
        environment: the process's own by default.
    """
    env = os.environ if environment is None else environment
    paths = (*filter(None, map(env.get, VARIABLES)), *SYSTEM)
    return next((path for path in map(Path, paths) if path.is_file()), None)


def context() -> ssl.SSLContext:
    """Return a context that trusts the bundle, and what OpenSSL itself is configured with.

    Raises:
        HostError: the bundle is malformed.
    """
    path = bundle()
    try:
        trusting = ssl.create_default_context()
        if path is not None and str(path) != ssl.get_default_verify_paths().cafile:
            trusting.load_verify_locations(path)
    except ssl.SSLError as error:
        hint = f"name a file of PEM certificates in {VARIABLES[0]}"
        raise HostError(f"cannot read the certificates in {path}", reason=str(error), hint=hint) from None
    return trusting


def variables(path: PurePath) -> dict[str, str]:
    """Return the variables that make uv, pip, curl, git, npm and cargo trust a bundle."""
    return dict.fromkeys(_PROGRAMS, str(path))


def export() -> None:
    """Have the libraries of this process trust the bundle too: those of the Hugging Face hub read these variables."""
    if (path := bundle()) is not None:
        for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"):
            os.environ.setdefault(name, str(path))
