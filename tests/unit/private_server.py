"""An HTTPS server on this machine, whose certificate only an authority of the test's own has signed."""

from __future__ import annotations

import functools
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class _Handler(SimpleHTTPRequestHandler):
    def do_POST(self) -> None:
        """Answer as a model's server."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def make_authority(place: Path) -> Path:
    """Write an authority's certificate, and one that it signed for 127.0.0.1; return the authority's."""

    def openssl(*options: str) -> None:
        key = ("-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
        subprocess.run(["openssl", "req", *key, *options], cwd=place, check=True, capture_output=True)

    openssl("-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=A company's authority")
    names = ("-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE")
    openssl(
        "-CA", "ca.pem", "-CAkey", "ca.key", "-keyout", "key.pem", "-out", "cert.pem", "-subj", "/CN=server", *names
    )
    return place / "ca.pem"


@contextmanager
def serve_files(directory: Path, authority: Path) -> Iterator[str]:
    """Serve a directory; yield the address.

    Args:
        directory: the files.
        authority: what :func:`make_authority` returned.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority.with_name("cert.pem"), authority.with_name("key.pem"))
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Handler, directory=str(directory))) as server:
        server.handle_error = lambda *_: None  # type: ignore[method-assign] # clients that do not trust us hang up
        # the handshake belongs to a request's own thread: a client that never makes it stops nobody
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"https://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
