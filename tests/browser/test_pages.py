"""The pages in a browser: the keyboard, a live run, and that nothing hostile runs. `make test-view` has Playwright."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.test_view import hostile
from tests.unit.training_tools import trajectory

from minisandbox.rollouts import RunDirectory
from minisandbox.view import Site
from minisandbox.view.server import serve

sync_api: Any = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: make test-view")
CHROMIUM = shutil.which("chromium")
pytestmark = [pytest.mark.once, pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    with RunDirectory.open(tmp_path / "first", {}) as run:
        run.write(trajectory("owner__repo-1", 0, 1.0))
        run.write(trajectory("owner__repo-1", 1, 0.0))
        run.write(hostile())
        yield run


@pytest.fixture
def page(run: RunDirectory, tmp_path: Path) -> Iterator[Any]:
    urls: list[str] = []
    ready = threading.Event()

    def started(url: str) -> None:
        urls.append(url)
        ready.set()

    threading.Thread(target=serve, args=(Site([tmp_path]), "127.0.0.1", 0, started), daemon=True).start()
    assert ready.wait(60)
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.problems = []
        page.on("console", lambda message: page.problems.append(message.text) if message.type == "error" else None)
        page.on("dialog", lambda dialog: page.problems.append(f"dialog: {dialog.message}"))
        page.goto(urls[0])
        yield page
        browser.close()


def test_the_keyboard_walks_from_the_runs_to_a_turn(page: Any) -> None:
    assert "token" not in page.url
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url("**/runs/first")
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url("**/rollouts/0/owner__repo-1")
    page.keyboard.press("j")
    page.keyboard.press("j")
    assert page.url.endswith("#turn-1")
    page.keyboard.press("p")
    assert page.url.endswith("#patch")
    page.keyboard.press("]")
    page.wait_for_url("**/rollouts/1/owner__repo-1")
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("u")
    page.wait_for_url("**/runs/first")
    assert page.problems == []


def test_a_live_run_shows_a_new_rollout(page: Any, run: RunDirectory) -> None:
    page.goto(page.url + "runs/first")
    assert page.get_by_text("owner__new-9").count() == 0
    page.wait_for_function("performance.getEntriesByType('resource').some(entry => entry.name.endsWith('page.js'))")
    run.write(trajectory("owner__new-9"))
    page.get_by_text("owner__new-9").wait_for(timeout=60_000)
    assert page.problems == []


def test_hostile_text_neither_runs_nor_breaks_the_page(page: Any) -> None:
    base = page.url
    for path in ("rollouts/0/hostile__task-1", "tasks/hostile__task-1", "tokens/0/hostile__task-1"):
        page.goto(f"{base}runs/first/{path}")
        assert page.locator("script").count() == 1
        assert page.locator("main img").count() == 0
    assert page.problems == []
