"""Serve runs to a browser, for the tests and for benchmarks/view_pages.py."""

from __future__ import annotations

import threading
from pathlib import Path

from minisandbox.view import Site
from minisandbox.view.server import serve


def serve_runs(path: Path) -> str:
    """Serve runs in a thread; return the address with the token."""
    urls: list[str] = []
    ready = threading.Event()

    def started(url: str) -> None:
        urls.append(url)
        ready.set()

    threading.Thread(target=serve, args=(Site([path]), "127.0.0.1", 0, started), daemon=True).start()
    assert ready.wait(60)
    return urls[0]
