"""The pages in a browser: each page, the keyboard, a live run, axe, hostile text. `make test-view` has Playwright."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.training_tools import trajectory

from minisandbox.rollouts import RunDirectory

pytestmark = [pytest.mark.once, pytest.mark.slow]
AXE = Path(os.environ.get("MINISANDBOX_AXE", ""))
TOO_WIDE = """() => document.documentElement.scrollWidth <= innerWidth ? [] : [...document.querySelectorAll("main *")]
    .filter(element => element.getBoundingClientRect().right > innerWidth).map(element => element.outerHTML)"""
PAGES = (
    "/", "/machine", "/compare?run=first&run=second", "/runs/first", "/runs/first/tasks?level=too+few",
    "/runs/first/tasks/owner__repo-1", "/runs/first/rollouts/0/owner__repo-1", "/runs/first/rollouts/1/owner__repo-1",
    "/runs/first/rollouts/2/owner__repo-1", "/runs/first/rollouts/0/owner__other-2",
    "/runs/first/tokens/0/owner__repo-1", "/runs/first/rollouts/0/hostile__task-1", "/runs/first/tasks/hostile__task-1",
    "/runs/first/tokens/0/hostile__task-1", "/runs/rl.rollouts/training", "/runs/rl.rollouts/training?step=6",
    "/runs/first?outcome=nothing",
)  # fmt: skip


def arrive(page: Any, address: str) -> None:
    page.wait_for_url(address)
    page.wait_for_load_state("load")  # the page's script has run


def press(page: Any, *keys: str) -> None:
    for key in keys:
        page.keyboard.press(key)


def test_the_keyboard_walks_from_the_runs_to_a_turn(open_page: Callable[..., Any], site: Path) -> None:
    page = open_page(site / "first")
    assert "token" not in page.url
    press(page, "j", "Enter")
    arrive(page, "**/runs/first")
    press(page, "/")
    page.keyboard.type("repo-1")
    press(page, "Enter")
    arrive(page, "**text=repo-1*")
    press(page, "j", "Enter")
    arrive(page, "**/rollouts/0/owner__repo-1")
    press(page, "j", "j")
    assert page.url.endswith("#turn-1")
    press(page, "o", "p")
    assert page.url.endswith("#patch")
    press(page, "t")
    assert page.url.endswith("#tests")
    press(page, "k", "g", "]")
    arrive(page, "**/rollouts/1/owner__repo-1")
    press(page, "?")
    assert page.locator("#help").is_visible()
    press(page, "Escape", "[")
    arrive(page, "**/rollouts/0/owner__repo-1")
    press(page, "u")
    arrive(page, "**/runs/first")


def test_each_page_fits_a_phone_and_a_desktop(open_page: Callable[..., Any], site: Path) -> None:
    page = open_page(site)
    for path in PAGES:
        assert page.goto(path).status == 200, path
        assert page.locator("h1").count() == 1, path
        assert page.locator("script").count() == 1, path  # the page's own
        assert page.locator("main img").count() == 0, path
        for width in (390, 1280):
            page.set_viewport_size({"width": width, "height": 800})
            assert page.evaluate(TOO_WIDE) == [], (path, width)


@pytest.mark.skipif(not AXE.is_file(), reason="MINISANDBOX_AXE names no axe.min.js: make test-view fetches it")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_problem(open_page: Callable[..., Any], site: Path, scheme: str) -> None:
    page, problems = open_page(site, color_scheme=scheme), {}
    for path in PAGES:
        page.goto(path)
        page.evaluate(AXE.read_text(encoding="utf-8"))
        violations = page.evaluate("axe.run(document, {resultTypes: ['violations']}).then(result => result.violations)")
        for violation in violations:
            if violation["impact"] in ("serious", "critical"):
                problems[violation["id"]] = f"{path}: {violation['nodes'][0]['html'][:200]}"
    assert not problems, "\n".join(f"{name}: {text}" for name, text in problems.items())


def test_two_runs_are_chosen_and_compared(open_page: Callable[..., Any], site: Path) -> None:
    page = open_page(site)
    page.get_by_label("compare first").check()
    page.get_by_role("button", name="Compare").click()
    assert page.get_by_role("button", name="Choose two runs first").is_visible()
    page.get_by_label("compare second").check()
    page.get_by_role("button", name="Choose").click()
    arrive(page, "**/compare?**")
    assert page.get_by_text("Option model").is_visible()


def test_grades_in_doubt_lead_to_their_rollouts(open_page: Callable[..., Any], site: Path) -> None:
    page = open_page(site)
    page.goto("/runs/first")
    page.locator("#doubts").get_by_role("link", name="1 suspicious pass").click()
    arrive(page, "**doubt=suspicious%20pass")
    page.locator("#rollouts").get_by_role("link", name="owner__repo-1").click()
    assert page.get_by_text("the patch reads variables of the code that calls it").is_visible()


def test_a_training_run_names_a_wrong_reason(open_page: Callable[..., Any], site: Path) -> None:
    page = open_page(site)
    page.goto("/runs/rl.rollouts/training")
    assert page.get_by_text("The reward rises for a wrong reason, from about step 5 on.").is_visible()
    page.locator("svg.columns-chart a").nth(5).click()
    arrive(page, "**/training?step=6")
    page.get_by_role("link", name="owner__repo-1").first.click()
    assert page.get_by_role("heading", name="In doubt").is_visible()
    page.go_back()
    page.goto("/runs/rl.rollouts/training")
    page.locator("svg.curve a").first.click()
    arrive(page, "**/training?step=1")


def test_a_run_of_20000_rollouts_is_paged_and_filtered(open_page: Callable[..., Any], site: Path) -> None:
    page = open_page(site)
    page.goto("/runs/many")
    assert page.get_by_text("1 to 100 of 20,000").is_visible()
    page.keyboard.press("n")
    arrive(page, "**page=2")
    page.locator(".facet").get_by_role("link", name="other/name").click()
    assert page.get_by_text("1 to 100 of 10,000").is_visible()
    page.get_by_role("link", name="by task").click()
    arrive(page, "**/tasks**")
    page.get_by_role("link", name="too hard").first.click()
    arrive(page, "**level=too**hard")
    assert page.get_by_role("heading", name="only too hard").is_visible()


def test_a_finished_quickstart_is_read_page_by_page(open_page: Callable[..., Any], quickstart: Path) -> None:
    page = open_page(quickstart)
    links = page.locator("td.id a").evaluate_all("links => links.map(link => link.getAttribute('href'))")
    assert len(links) == 3
    for link in links:
        page.goto(link)
        press(page, "j", "Enter")
        arrive(page, "**/rollouts/0/**")
        assert page.locator("#grade h2").inner_text()
        page.locator(".crumbs a").nth(1).click()
        arrive(page, "**/tasks/**")
        assert page.get_by_role("heading", name="Patches side by side").is_visible()


def test_a_live_run_shows_a_new_rollout_and_its_progress(open_page: Callable[..., Any], tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "live", {"rollouts": 4}) as run:
        run.write(trajectory("owner__repo-1"))
        page = open_page(tmp_path)
        page.goto("/runs/live")
        assert page.locator("progress").get_attribute("value") == "1"
        assert page.get_by_text("owner__new-9").count() == 0
        page.wait_for_load_state("load")
        run.write(trajectory("owner__new-9"))
        page.locator("#rollouts").get_by_text("owner__new-9").wait_for(timeout=60_000)
        assert page.locator("progress").get_attribute("value") == "2"
