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
from minisandbox.types import JSONValue

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
    """Return the files that may hold credentials, in podman's order."""
    home = Path.home()
    runtime, config = os.environ.get("XDG_RUNTIME_DIR"), os.environ.get("XDG_CONFIG_HOME")
    docker = os.environ.get("DOCKER_CONFIG")
    if named := os.environ.get("REGISTRY_AUTH_FILE"):
        return [Path(named)]
    return [
        Path(runtime, "containers/auth.json") if runtime else Path(f"/run/containers/{os.geteuid()}/auth.json"),
        (Path(config) if config else home / ".config") / "containers/auth.json",
        (Path(docker) if docker else home / ".docker") / "config.json",
    ]


def find_credentials(host: str, repository: str, files: Sequence[Path] | None = None) -> Credentials | None:
    """Return the credentials for a repository, or None for anonymous requests.

    Args:
        host: the registry.
        repository: the repository; an entry may be limited to some repositories of a registry.
        files: the files to read; None for the default files.

    Raises:
        InvalidValue: a file is malformed.
        RegistryError: a credential helper failed.
    """
    for file in auth_files() if files is None else files:
        if not file.is_file():
            continue
        values = _read(file)
        credentials = _of_helper(values, host, file) or _of_table(values, host, repository, file)
        if credentials is not None:
            return credentials
    return None


def _read(file: Path) -> Mapping[str, JSONValue]:
    try:
        values = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise InvalidValue(f"{file} cannot be read", reason=error.strerror, hint="it holds credentials") from error
    except ValueError as error:  # do not quote the file's text, which contains secrets
        raise InvalidValue(f"{file} is not JSON", reason=type(error).__name__, hint="log in again") from None
    if not isinstance(values, dict):
        raise InvalidValue(f"{file} is no JSON object", hint="log in again with `podman login` or `docker login`")
    return values


def _of_table(values: Mapping[str, JSONValue], host: str, repository: str, file: Path) -> Credentials | None:
    table = values.get("auths")
    if not isinstance(table, Mapping):
        return None
    parts = repository.split("/")
    names = [f"{host}/{'/'.join(parts[:count])}" for count in range(len(parts), 0, -1)] + _names(host)
    for name in names:
        row = table.get(name)
        if isinstance(row, Mapping) and (credentials := _of_row(row, name, file)) is not None:
            return credentials
    return None


def _names(host: str) -> list[str]:
    hosts = _HUB_NAMES if host == DOCKER_HUB else (host,)
    return [name for one in hosts for name in (one, f"https://{one}", f"https://{one}/v1/", f"http://{one}")]


def _of_row(row: Mapping[str, JSONValue], name: str, file: Path) -> Credentials | None:
    token, text = row.get("identitytoken"), row.get("auth")
    if isinstance(token, str) and token:
        return Credentials("", token)
    if not isinstance(text, str) or not text:
        return None
    try:
        user, colon, password = base64.b64decode(text, validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        colon = ""
    if not colon:
        raise InvalidValue(f"{file}: the entry of {name} is malformed", hint=f"log in again: `podman login {name}`")
    return Credentials(user, password.rstrip("\0"))


def _of_helper(values: Mapping[str, JSONValue], host: str, file: Path) -> Credentials | None:
    """Run a credential helper and return its credentials (docker-credential-helpers, command ``get``)."""
    helpers, store = values.get("credHelpers"), values.get("credsStore")
    table = helpers if isinstance(helpers, Mapping) else {}
    server = _HUB_NAMES[1] if host == DOCKER_HUB else host
    name = table.get(server) or table.get(host) or store
    if not isinstance(name, str) or not name:
        return None
    if not _HELPER.fullmatch(name):
        raise InvalidValue(f"{file}: {name!r} is not a credential helper's name")
    program = f"docker-credential-{name}"
    try:
        done = subprocess.run(
            [program, "get"], input=server, capture_output=True, text=True, timeout=_HELPER_SECONDS, check=False
        )
        answer = json.loads(done.stdout) if done.returncode == 0 else None
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise RegistryError(
            f"cannot get credentials for {host} from {program}",
            reason=type(error).__name__,
            hint=f"{file} names this program: install it, or remove the entry",
        ) from None
    if not isinstance(answer, dict):  # the helper has no credentials for this registry
        return None
    user, secret = str(answer.get("Username") or ""), str(answer.get("Secret") or "")
    return Credentials("" if user == _TOKEN_USER else user, secret) if secret else None
