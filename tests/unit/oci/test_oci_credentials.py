"""Credentials for registries: who gets them, who does not, and what a hostile answer does with them."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from tests.unit.oci_registry import Registry, answer, serve
from tests.unit.oci_tools import END, MadeImage, entry

from minisandbox.errors import RegistryError
from minisandbox.images import pull
from minisandbox.images.oci import http
from minisandbox.store import Store

PASSWORD = "pass:word"


@pytest.fixture
def image() -> MadeImage:
    """An image of a layer."""
    return MadeImage([entry("a", b"x") + END])


def log_in(tmp_path: Path, **values: object) -> None:
    """Write the auth file."""
    (tmp_path / "auth.json").write_text(json.dumps(values))


def basic(text: str) -> dict[str, str]:
    """An entry of an auth file."""
    return {"auth": base64.b64encode(text.encode()).decode()}


@pytest.mark.parametrize("user", ["", f"me:{PASSWORD}"])
def test_a_token_is_fetched(server: Registry, store: Store, image: MadeImage, tmp_path: Path, user: str) -> None:
    server.token, server.basic = "T0KEN", user
    if user:
        log_in(tmp_path, auths={f"127.0.0.1:{server.port}/team": basic(user)})
    assert pull(server.add(image, "1"), store=store).layers
    asked = server.paths("/token")
    assert len(asked) == 1
    assert "scope=repository%3Ax%3Apull" in asked[0]


def test_an_identity_token_is_exchanged(server: Registry, store: Store, image: MadeImage, tmp_path: Path) -> None:
    server.token, server.basic = "T0KEN", "me:x"
    log_in(tmp_path, auths={f"127.0.0.1:{server.port}": {"identitytoken": "long-lived"}})
    assert pull(server.add(image, "1"), store=store).layers
    assert [values["refresh_token"] for path, values in server.requests if path == "refresh"] == ["long-lived"]


def test_basic_authentication(server: Registry, store: Store, image: MadeImage, tmp_path: Path) -> None:
    server.basic = f"me:{PASSWORD}"
    log_in(tmp_path, auths={f"127.0.0.1:{server.port}": basic(server.basic)})
    assert pull(server.add(image, "1"), store=store).layers


def test_credentials_do_not_follow_a_redirect(server: Registry, store: Store, image: MadeImage, tmp_path: Path) -> None:
    server.basic = f"me:{PASSWORD}"
    log_in(tmp_path, auths={f"127.0.0.1:{server.port}": basic(server.basic)})
    reference = server.add(image, "1")
    with serve() as elsewhere:
        elsewhere.blobs = image.blobs
        for name in image.blobs:
            target = f"http://127.0.0.1:{elsewhere.port}/v2/x/blobs/{name}"
            server.faults[f"/blobs/{name}"] = [lambda _: False, answer(307, Location=target)] * 0 + [
                answer(307, Location=target)
            ]
        assert pull(reference, store=store).layers
        assert elsewhere.paths("/blobs/")
        assert not any("authorization" in headers for _, headers in elsewhere.requests)


def test_wrong_credentials_are_not_repeated(server: Registry, store: Store, image: MadeImage, tmp_path: Path) -> None:
    server.basic = "me:right"
    log_in(tmp_path, auths={f"127.0.0.1:{server.port}": basic(f"me:{PASSWORD}")})
    said = json.dumps({"errors": [{"code": "DENIED", "message": f"not {PASSWORD}"}]}).encode()
    server.faults["/manifests/"] = [answer(401, WWW_Authenticate='Basic realm="x"'), answer(401, said)]
    with pytest.raises(RegistryError, match="not accepted") as caught:
        pull(server.add(image, "1"), store=store)
    assert PASSWORD not in str(caught.value)
    assert "DENIED" in str(caught.value)


def test_a_secret_is_hidden_before_the_text_is_cut(
    server: Registry, store: Store, image: MadeImage, tmp_path: Path
) -> None:
    password = "s3cret" * 10
    server.basic = "me:right"
    log_in(tmp_path, auths={f"127.0.0.1:{server.port}": basic(f"me:{password}")})
    said = json.dumps({"errors": [{"code": "DENIED", "message": "x" * 80 + password}]}).encode()
    server.faults["/manifests/"] = [answer(401, WWW_Authenticate='Basic realm="x"'), answer(401, said)]
    with pytest.raises(RegistryError, match="DENIED") as caught:
        pull(server.add(image, "1"), store=store)
    assert "s3cret" not in str(caught.value)


TOKENS = {
    "deep": b"[" * 100_000,
    "empty": b'{"token": ""}',
    "not ASCII": b'{"token": "\xc3\xa9"}',
    "two lines": b'{"token": "a\\nHost: b"}',
}


@pytest.mark.parametrize("case", TOKENS)
def test_a_token_that_cannot_be_used(server: Registry, store: Store, image: MadeImage, case: str) -> None:
    realm = f'Bearer realm="http://127.0.0.1:{server.port}/odd"'
    server.faults = {"/manifests/": [answer(401, WWW_Authenticate=realm)], "/odd": [answer(200, TOKENS[case])]}
    with pytest.raises(RegistryError, match="answer has no token"):
        pull(server.add(image, "1"), store=store)


@pytest.mark.parametrize("realm", ["http://[x", "http://example.invalid/token", "file:///etc/passwd"])
def test_a_registry_of_this_machine_sends_nobody_elsewhere(
    server: Registry, store: Store, image: MadeImage, realm: str
) -> None:
    server.faults["/manifests/"] = [answer(401, WWW_Authenticate=f'Bearer realm="{realm}"')]
    with pytest.raises(RegistryError, match="not sent without TLS"):
        pull(server.add(image, "1"), store=store)


def test_credentials_are_not_sent_to_a_token_server_without_tls(
    store: Store, image: MadeImage, monkeypatch: pytest.MonkeyPatch, server: Registry
) -> None:
    monkeypatch.setattr(http.RegistryClient, "_may_be_plain", False)
    monkeypatch.setattr(http.RegistryClient, "_base", lambda self: f"http://{self.remote.host}")
    server.token = "T0KEN"
    with pytest.raises(RegistryError, match="not sent without TLS"):
        pull(server.add(image, "1"), store=store)
