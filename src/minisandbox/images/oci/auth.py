"""Find credentials for registries in the files of podman and docker (containers-auth.json(5))."""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from minisandbox.errors import InvalidValue, RegistryError
from minisandbox.spec import DOCKER_HUB
from minisandbox.values import JSONValue

_HELPER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_HELPER_SECONDS = 30.0
_HUB_NAMES = (DOCKER_HUB, "https://index.docker.io/v1/", "index.docker.io", "registry-1.docker.io")
_TOKEN_USER = "<token>"  # noqa: S105 - the user name with which credential helpers mark an identity token


@dataclass(frozen=True, slots=True)
class Credentials:
    """Credentials for a registry.

    Attributes:
        user: the user name; "" if the secret is an identity token.
        secret: a password or an identity token.
    """

    user: str
    secret: str = field(repr=False)

    def basic(self) -> str:
        """Return the value of an Authorization header for HTTP basic authentication."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.secret}".encode()).decode()


def auth_files() -> list[Path]:
    """Return the paths of possible credential files, in podman's order of precedence."""
    if auth_file := os.environ.get("REGISTRY_AUTH_FILE"):
        return [Path(auth_file)]
    home, runtime_folder = Path.home(), os.environ.get("XDG_RUNTIME_DIR")
    return [
        Path(f"{runtime_folder}/containers" if runtime_folder else f"/run/containers/{os.geteuid()}", "auth.json"),
        Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config", "containers/auth.json"),
        Path(os.environ.get("DOCKER_CONFIG") or home / ".docker", "config.json"),
    ]


def find_credentials(host: str, repository: str, files: Sequence[Path] | None = None) -> Credentials | None:
    """Return the credentials for a repository, or None for anonymous requests.

    Args:
        host: the registry.
        repository: the repository, because an entry of a file may apply to only part of a registry.
        files: the files to read; None for the default files.

    Raises:
        InvalidValue: a file is malformed.
        RegistryError: a credential helper failed.
    """
    for file in auth_files() if files is None else files:
        if not file.is_file():
            continue
        settings = _read(file)
        credentials = _of_helper(settings, host, file) or _of_table(settings, host, repository, file)
        if credentials is not None:
            return credentials
    return None


def _read(file: Path) -> Mapping[str, JSONValue]:
    try:
        settings = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise InvalidValue(f"{file} cannot be read", reason=error.strerror, hint="it holds credentials") from error
    except ValueError as error:  # do not quote the file, which contains secrets
        raise InvalidValue(f"{file} is not JSON", reason=type(error).__name__, hint="log in again") from None
    if not isinstance(settings, dict):
        raise InvalidValue(f"{file} is no JSON object", hint="log in again with `podman login` or `docker login`")
    return settings


def _of_table(settings: Mapping[str, JSONValue], host: str, repository: str, file: Path) -> Credentials | None:
    table = settings.get("auths")
    if not isinstance(table, Mapping):
        return None
    parts = repository.split("/")
    names = [f"{host}/{'/'.join(parts[:depth])}" for depth in range(len(parts), 0, -1)] + _names(host)
    for name in names:
        row = table.get(name)
        if isinstance(row, Mapping) and (credentials := _of_row(row, name, file)) is not None:
            return credentials
    return None


def _names(host: str) -> list[str]:
    hosts = _HUB_NAMES if host == DOCKER_HUB else (host,)
    return [
        name
        for hostname in hosts
        for name in (hostname, f"https://{hostname}", f"https://{hostname}/v1/", f"http://{hostname}")
    ]


def _of_row(row: Mapping[str, JSONValue], name: str, file: Path) -> Credentials | None:
    token, encoded = row.get("identitytoken"), row.get("auth")
    if isinstance(token, str) and token:
        return Credentials("", token)
    if not isinstance(encoded, str) or not encoded:
        return None
    try:
        user, colon, password = base64.b64decode(encoded, validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        colon = ""
    if not colon:
        raise InvalidValue(f"{file}: the entry of {name} is malformed", hint=f"log in again: `podman login {name}`")
    return Credentials(user, password.rstrip("\0"))


def _of_helper(settings: Mapping[str, JSONValue], host: str, file: Path) -> Credentials | None:
    """Run a credential helper and return its credentials (docker-credential-helpers, command ``get``)."""
    helpers, default_helper = settings.get("credHelpers"), settings.get("credsStore")
    table = helpers if isinstance(helpers, Mapping) else {}
    server = _HUB_NAMES[1] if host == DOCKER_HUB else host
    name = table.get(server) or table.get(host) or default_helper
    if not isinstance(name, str) or not name:
        return None
    if not _HELPER.fullmatch(name):
        raise InvalidValue(f"{file}: {name!r} is not a credential helper's name")
    program = f"docker-credential-{name}"
    try:
        process = subprocess.run(
            [program, "get"], input=server, capture_output=True, text=True, timeout=_HELPER_SECONDS, check=False
        )
        output = json.loads(process.stdout) if process.returncode == 0 else None
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise RegistryError(
            f"cannot get credentials for {host} from {program}",
            reason=type(error).__name__,
            hint=f"{file} names this program: install it, or remove the entry",
        ) from None
    if not isinstance(output, dict):  # the helper has no credentials for this registry
        return None
    user, secret = str(output.get("Username") or ""), str(output.get("Secret") or "")
    return Credentials("" if user == _TOKEN_USER else user, secret) if secret else None
