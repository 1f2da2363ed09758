"""The pages: who may read them, what they show, and that nothing an agent writes is more than text."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import html
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from urllib.request import HTTPCookieProcessor, build_opener

import pytest
from tests.unit.training_tools import FLAG, PATCH, trajectory

from minisandbox.cli.main import main
from minisandbox.errors import NotFound
from minisandbox.grade import Flag, Grade, Reason, Verdict
from minisandbox.rollouts import RunDirectory
from minisandbox.store import FailureRecord, Store
from minisandbox.trajectories import Failure, PatchRecord, StepRecord, Trajectory
from minisandbox.view import Site
from minisandbox.view.index import Filter, Mix, RunIndex, repository_of, wilson
from minisandbox.view.rollout import passages, token_spans, turns_of
from minisandbox.view.site import find_runs
from minisandbox.view.text import diff_of, excerpt, visible
from minisandbox.view.training import Plan, plan_of, rise_of

pytest.importorskip("starlette", reason="the extra [view] is not installed")
pytest.importorskip("jinja2", reason="the extra [view] is not installed")
pytest.importorskip("uvicorn", reason="the extra [view] is not installed")

from starlette.testclient import TestClient

from minisandbox.view.pages import STATIC, Pages
from minisandbox.view.server import application, changes, is_own_host

pytestmark = pytest.mark.once
TOKEN = "0123456789"
HOSTILE = "</pre></textarea>'\"><script>alert(1)</script><img src=x onerror=alert(2)>{{7*7}}"
HOSTILE += "\x1b[2J\x00\u202egnp.\u2066\ud800\ufeff"
SHOWN = r"\x1b[2J\x00\u202egnp.\u2066\ud800\ufeff"
FORBIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")


def hostile() -> Trajectory:
    """A rollout whose agent, model, tests and workspace wrote HOSTILE wherever they can write."""
    base, raw = trajectory("hostile__task-1"), HOSTILE.encode("utf-8", "surrogatepass") + b"\xff\xfe"
    step = StepRecord(HOSTILE, "exited", 1, None, raw + b"x" * 50_000, raw, 5, 5, 1.0, 1)
    assert base.grade is not None
    grade = replace(
        base.grade, verdict=Verdict.TAMPERED, reason=Reason.CHANGED_TEST_PASSED, detail=HOSTILE, log=HOSTILE,
        outcomes=((HOSTILE, HOSTILE), (f"{HOSTILE}2", "passed")), flags=(Flag(HOSTILE, HOSTILE, HOSTILE),),
    )  # fmt: skip
    messages = tuple(
        replace(message, content=f"{HOSTILE}\n```bash\n{HOSTILE}\n```", reasoning=HOSTILE) for message in base.messages
    )
    return replace(
        base, messages=messages, steps=(step, replace(step, command=("sh", HOSTILE))), submission=b"+" + raw,
        grade=grade, exit_status=HOSTILE, detail=HOSTILE, agent=HOSTILE, model=HOSTILE,
        patches=(PatchRecord(1, b"+" + raw), PatchRecord(2, None, HOSTILE)),
        tries=(Failure("model", HOSTILE, HOSTILE),),
    )  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs")
    with RunDirectory.open(path / "first", {"agent": "bash", "hint": HOSTILE.replace("\ud800", "")}) as run:
        run.write(trajectory("owner__repo-1", 0, 1.0))
        run.write(trajectory("owner__repo-1", 1, 0.0))
        run.write(trajectory("owner__other-2", 0, 0.0))
        failure = Failure("model", "ModelUnavailable", "the server is gone")
        run.write(trajectory("owner__other-2", 1, failure=failure, grade=None))
        run.write(hostile())
    with RunDirectory.open(path / "nested" / "rl" / "rollouts", {}) as run:
        run.write(trajectory("owner__repo-1", 0, 0.0))
    return path


@pytest.fixture(scope="module")
def client(runs: Path) -> Iterator[TestClient]:
    with TestClient(application(Site([runs]), TOKEN, "127.0.0.1"), base_url="http://127.0.0.1:8642") as client:
        assert client.get("/", params={"token": TOKEN}).status_code == 200
        yield client


def anonymous(runs: Path, host: str = "127.0.0.1:8642") -> TestClient:
    return TestClient(application(Site([runs]), TOKEN, "127.0.0.1"), base_url=f"http://{host}", follow_redirects=False)


# --- who may read ----------------------------------------------------------------------------------------------------


def test_nothing_is_answered_without_the_token(runs: Path) -> None:
    client = anonymous(runs)
    paths = (
        "/",
        "/runs/first",
        "/runs/first/rollouts/0/owner__repo-1",
        "/static/style.css",
        "/runs/first/events",
        "/nothing",
    )
    for path in paths:
        for query in ("", "?token=", f"?token={TOKEN[:-1]}", f"?token={TOKEN}x", "?token=%ff"):
            response = client.get(path + query)
            assert (response.status_code, response.headers.get("set-cookie")) == (403, None), path + query
            assert "owner__repo" not in response.text


def test_the_token_becomes_a_cookie_and_leaves_the_address(runs: Path) -> None:
    client = anonymous(runs)
    response = client.get(f"/runs/first?outcome=resolved&token={TOKEN}")
    assert (response.status_code, response.headers["location"]) == (303, "/runs/first?outcome=resolved")
    cookie = response.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert client.get(response.headers["location"]).status_code == 200
    elsewhere = client.get(f"http://127.0.0.1:8642//evil.example/x?token={TOKEN}")
    assert elsewhere.headers["location"] == "/evil.example/x"


def test_a_name_of_another_site_is_refused_even_with_the_token(runs: Path) -> None:
    """DNS rebinding: the browser believes that the server belongs to the attacker's name."""
    client = anonymous(runs, "evil.example:8642")
    assert client.get(f"/?token={TOKEN}").status_code == 421
    client.cookies.set("minisandbox-view-8642", TOKEN)
    assert client.get("/").status_code == 421
    accepted = ("localhost:1", "127.0.0.1", "[::1]:8642", "10.1.2.3:80", "LOCALHOST:8642")
    refused = (
        "",
        "evil.example",
        "127.0.0.1.evil.example:8642",
        "localhost.evil.example",
        "localhost:8642@evil",
        "a b",
    )
    assert [is_own_host(name, "127.0.0.1") for name in (*accepted, *refused)] == [True] * 5 + [False] * 6
    assert is_own_host("node7:8642", "node7")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_the_server_only_reads(client: TestClient, method: str) -> None:
    origin = {"Origin": "http://127.0.0.1:8642"}
    assert client.request(method, "/runs/first", headers=origin).status_code == 405


def test_only_a_page_of_the_server_may_start_a_replay(client: TestClient, runs: Path) -> None:
    path = "/runs/first/replay/0/owner__none-1"
    for origin in ("", "null", "http://evil.example", "http://127.0.0.1:9000", "https://127.0.0.1:8642"):
        headers = {"Origin": origin} if origin else {}
        assert client.post(path, headers=headers).status_code == 403, origin
    own = {"Origin": "http://127.0.0.1:8642"}
    assert client.post(path, headers=own).status_code == 404  # accepted: there is no such rollout
    assert anonymous(runs).post(path, headers=own).status_code == 403
    assert client.get(path).status_code == 405


def test_each_answer_has_a_strict_policy(client: TestClient, runs: Path) -> None:
    answers = [
        client.get("/"), client.get("/runs/first"), client.get("/static/page.js"), client.get("/nothing"),
        client.get("/runs/first/raw/0/hostile__task-1?part=patch"), anonymous(runs).get("/"),
    ]  # fmt: skip
    for answer in answers:
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        assert answer.headers["cache-control"] == "no-store"


def test_static_files_are_those_of_the_package_only(client: TestClient) -> None:
    assert client.get("/static/style.css").headers["content-type"].startswith("text/css")
    for name in ("..%2fpages.py", "%2e%2e%2fpages.py", "%2fetc%2fpasswd", "nothing.css"):
        assert client.get(f"/static/{name}").status_code == 404, name


# --- what is shown ---------------------------------------------------------------------------------------------------


class _Elements(HTMLParser):
    """Collect the elements of a page and check what a script could use."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts: list[str | None] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = dict(attrs)
        assert not [name for name in names if name.startswith("on") or name in ("style", "srcdoc", "formaction")]
        assert tag not in ("img", "iframe", "object", "embed", "base", "style")
        for name in ("href", "src", "action"):
            assert (names.get(name) or "/").startswith(("/", "#", "?")), names
            assert not (names.get(name) or "").startswith("//"), names
        if tag == "script":
            self.scripts.append(names.get("src"))


PATHS = (
    "/", "/runs/first", "/runs/first/tasks", "/runs/first?text=owner", "/runs/first/tasks/hostile__task-1",
    "/runs/first/rollouts/0/hostile__task-1", "/runs/first/tokens/0/hostile__task-1",
    "/compare?run=first&run=rl.rollouts",
    "/runs/first/rollouts/0/owner__repo-1", "/runs/first/rollouts/1/owner__other-2", "/runs/%3Cscript%3E",
    "/runs/first?text=%3Cscript%3E%22'&sort=%3C&outcome=%3Cb%3E",
)  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_what_agents_write_is_only_text(client: TestClient, path: str) -> None:
    response = client.get(path)
    assert response.status_code in (200, 404)
    assert not FORBIDDEN.search(response.text.replace("\n", ""))
    page = _Elements()
    page.feed(response.text)
    assert page.scripts == ["/static/page.js"]
    assert "<script>alert" not in response.text


def test_every_hostile_field_is_shown_with_escapes(client: TestClient) -> None:
    text = client.get("/runs/first/rollouts/0/hostile__task-1").text
    assert text.count(SHOWN) > 20
    assert "49" not in re.findall(r"\{\{(.*?)\}\}", text)
    assert "{{7*7}}" in text
    raw = client.get("/runs/first/raw/0/hostile__task-1", params={"part": "stdout 0"})
    assert raw.headers["content-type"] == "text/plain; charset=utf-8"
    assert SHOWN.replace(r"\ud800", r"\xed\xa0\x80") in raw.text
    assert not FORBIDDEN.search(raw.text.replace("\n", ""))


def test_a_rollout_shows_its_turns_patch_and_tests(client: TestClient) -> None:
    text = client.get("/runs/first/rollouts/0/owner__repo-1").text
    for words in (
        'id="turn-1"',
        'id="turn-2"',
        "I look.",
        "@@ -1 +1 @@",
        "Resolved",
        "/runs/first/tokens/0/owner__repo-1",
    ):
        assert words in text
    assert 'href="/runs/first/rollouts/1/owner__other-2"' in text  # the rollout before it
    failed = client.get("/runs/first/rollouts/1/owner__other-2").text
    assert "infrastructure error in model" in failed
    assert "the server is gone" in failed


def test_filters_are_in_the_address(client: TestClient) -> None:
    def ids(query: str) -> list[str]:
        return re.findall(
            r'class="id"><a href="/runs/first/rollouts/(\d/[^"]+)"', client.get(f"/runs/first{query}").text
        )

    assert len(ids("")) == 5
    assert ids("?outcome=resolved") == ["0/owner__repo-1"]
    assert ids("?outcome=failed+in+model") == ["1/owner__other-2"]
    assert ids("?repo=owner/other") == ["0/owner__other-2", "1/owner__other-2"]
    assert ids("?text=REPO-1&sort=newest&page=1") and set(ids("?text=REPO-1")) == {"0/owner__repo-1", "1/owner__repo-1"}  # noqa: PT018 - one filter
    assert ids("?page=2") == []
    assert ids("?outcome=' OR 1 --") == []
    for query in ("?page=x", "?page=-1", "?page=99999999999999999999", "?sort=DROP", "?unknown=1"):
        assert len(ids(query)) == 5, query


def test_missing_things_are_not_found(client: TestClient) -> None:
    first = "/runs/first"
    for path in (
        "/runs/none", f"{first}/rollouts/7/owner__repo-1", f"{first}/tasks/none", f"{first}/raw/0/owner__repo-1",
        f"{first}/raw/0/owner__repo-1?part=message+99", f"{first}/tokens/0/owner__repo-1?row=9",
        f"{first}/tokens/0/owner__repo-1?start=999999", "/compare?run=first&run=none", "/compare?run=first",
        f"{first}/rollouts/x/owner__repo-1",
    ):  # fmt: skip
        assert client.get(path).status_code == 404, path


def test_runs_are_found_below_the_given_paths(runs: Path, tmp_path: Path) -> None:
    assert [path.relative_to(runs) for path in find_runs(runs)] == [Path("first"), Path("nested/rl/rollouts")]
    (tmp_path / "link").symlink_to(runs)
    assert list(find_runs(tmp_path)) == []
    site = Site([runs])
    assert [run.key for run in site.runs()] == ["first", "rl.rollouts"]
    assert site.run("first").config["agent"] == "bash"
    with pytest.raises(NotFound):
        site.run("second")
    assert Site([tmp_path]).runs() == []
    assert "No run yet" in Pages(Site([tmp_path])).runs()


def test_a_point_of_a_curve_leads_to_its_rollouts(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "rl" / "rollouts", {}) as run:
        run.write(trajectory("owner__repo-1", 0, 0.0))
        run.write(trajectory("owner__repo-1", 12, 1.0))
    log = ['{"step": 1, "reward": 0.25, "note": "<b>"}', '{"step": 2, "reward": 0.5, "loss": NaN}', '{"step": 3, "rew']
    (tmp_path / "rl" / "log.jsonl").write_text("\n".join(log))
    (tmp_path / "rl" / "config.yaml").write_text("steps: 9\ngroups: {size: 8, redo: 1, unconfirmed_reward: 1.0}\n")
    lines = [("owner__repo-1__0", -0.5), ("owner__repo-1__12", 0.5), ("broken", 1.0)]
    text = "".join(
        f'{{"step": 2, "rollout": "{name}", "advantage": {weight}, "tokens": 7}}\n' for name, weight in lines
    )
    (tmp_path / "rl" / "rollouts.jsonl").write_text(text)
    pages = Pages(Site([tmp_path]))
    assert 'href="/runs/rl.rollouts/training"' in pages.run("rl.rollouts", Filter())
    curves = pages.training("rl.rollouts", 0)
    assert re.findall(r'<a href="([^"]*)"><circle', curves)[:2] == [
        "/runs/rl.rollouts/training?step=1", "/runs/rl.rollouts/training?step=2",
    ]  # fmt: skip
    assert "<title>2: 0.5</title>" in curves
    assert "step 3 of 9" not in curves
    assert "step 2 of 9" in curves  # the third line is truncated
    assert re.findall(r'<a href="([^"]*)" aria-label="(step 1: believed 50%[^"]*)"', curves) == [
        ("/runs/rl.rollouts/training?step=1",
         "step 1: believed 50%, suspicious 0%, unconfirmed 0%, tampered 0%; mean reward 0.25"),
    ]  # fmt: skip
    rollouts = re.findall(r'href="/runs/rl.rollouts/rollouts/([^"]+)"', pages.training("rl.rollouts", 2))
    assert rollouts == ["12/owner__repo-1", "0/owner__repo-1"]
    with RunDirectory.open(tmp_path / "plain", {}) as run:
        run.write(trajectory("owner__repo-1"))
    with pytest.raises(NotFound):
        pages.training("plain", 0)


def test_a_rise_of_the_reward_without_believed_passes_is_reported() -> None:
    rewards = [(step, 0.2 if step < 7 else 0.9) for step in range(1, 13)]
    honest = [Mix(step, 10, 2 if step < 7 else 9, 0, 0, 0) for step in range(1, 13)]
    wrong = [Mix(step, 10, 2, 0, 0 if step < 7 else 7, 0) for step in range(1, 13)]
    rise = rise_of(rewards, wrong)
    assert rise is not None
    assert (rise.is_wrong, rise.start) == (True, 7)
    assert rise.doubts == pytest.approx((0.0, 0.7))
    rise = rise_of(rewards, honest)
    assert rise is not None
    assert not rise.is_wrong
    assert rise_of(rewards[:3], wrong[:3]) is None


def test_the_plan_of_a_training_run_is_read_from_its_configuration(tmp_path: Path) -> None:
    assert plan_of(tmp_path) is None
    for text in ("[", "groups: 7", "groups: {size: x}", "groups: {size: 2, unconfirmed_reward: <b>}", "steps: 1"):
        (tmp_path / "config.yaml").write_text(text)
        assert plan_of(tmp_path) is None, text
    (tmp_path / "config.yaml").write_text("steps: 3\ngroups: {size: 4, redo: 1}\n")
    assert plan_of(tmp_path) == Plan(3, 8, None)


def test_grades_in_doubt_and_levels_of_tasks(tmp_path: Path) -> None:
    grade = Grade("owner__b-2", Verdict.UNCONFIRMED, Reason.UNCONFIRMED, "the changed tests passed")
    with RunDirectory.open(tmp_path / "run", {"rollouts": 9}) as run:
        run.write(trajectory("owner__a-1", 0, 1.0, flags=(FLAG,)))
        run.write(trajectory("owner__a-1", 1, 1.0))
        run.write(trajectory("owner__b-2", 0, grade=grade))
        run.write(trajectory("owner__b-2", 1, 0.0))
        run.write(trajectory("owner__c-3", 0, 0.0, flags=(FLAG,)))
        run.write(trajectory("owner__c-3", 1, 0.0))
    pages = Pages(Site([tmp_path]))
    index = pages.site.run("run").index
    assert index.counts("doubt", Filter()) == [("not confirmed", 1, None), ("suspicious pass", 1, 1.0)]
    assert [row.instance_id for row in index.rows(Filter(doubt="any"))] == ["owner__a-1", "owner__b-2"]
    assert [row.attempt for row in index.rows(Filter(doubt="not confirmed"))] == [0]
    levels = {task.instance_id: task.level for task in index.tasks(Filter())}
    assert levels == {"owner__a-1": "too easy", "owner__b-2": "too few", "owner__c-3": "too hard"}
    page = pages.run("run", Filter())
    assert "the patch reads variables of the code that calls it" in page
    assert '<progress max="9" value="6"' in page
    assert "in progress: about" in page
    assert "owner__c-3" not in pages.tasks("run", Filter(), "too easy")
    assert "in doubt: suspicious pass" in pages.rollout("run", "owner__a-1", 0)


def test_a_run_without_the_column_of_flags_is_read_and_resumed(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", {}) as run:
        run.write(trajectory("owner__a-1", 0, 1.0, flags=(FLAG,)))
    with closing(sqlite3.connect(tmp_path / "run" / "rollouts.sqlite")) as database, database:
        database.execute("ALTER TABLE rollouts DROP COLUMN flags")
    index = RunIndex(tmp_path / "run" / "rollouts.sqlite", readonly=True)
    assert index.totals(Filter()).doubts == 0
    assert [summary.flags for summary in index.summaries()] == [""]
    index.close()
    with RunDirectory.open(tmp_path / "run", {}) as run:
        run.write(trajectory("owner__a-1", 1, 1.0, flags=(FLAG,)))
        assert [summary.flags for summary in run.summaries()] == ["", FLAG.kind]


def test_the_images_and_sandboxes_of_this_machine(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINISANDBOX_STORE", str(tmp_path / "store"))
    assert "None yet" in client.get("/machine").text
    assert not (tmp_path / "store").exists()
    store = Store.open(tmp_path / "store")
    text = HOSTILE.replace("\ud800", "")
    store.put_failure(FailureRecord("broken", text, "3" * 64, (), (), "/testbed", 1.0, text))
    page = client.get("/machine").text
    assert "broken" in page
    assert SHOWN.replace(r"\ud800", "") in page
    _Elements().feed(page)
    assert "<script>alert" not in page


def test_an_export_is_one_file_without_scripts(runs: Path, tmp_path: Path) -> None:
    assert main(["view", str(runs), "--export", str(tmp_path / "report.html"), "--rollouts", "5"]) == 0
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert not FORBIDDEN.search(text.replace("\n", ""))
    assert "<script" not in text
    assert "default-src 'none'" in html.unescape(text)
    ids = {html.unescape(name) for name in re.findall(r' id="([^"]*)"', text)}
    links = {html.unescape(link) for link in re.findall(r'href="([^"]*)"', text)}
    assert {link[:1] for link in links} == {"#"}
    assert {"#first", "#rl.rollouts", "#first/owner__repo-1/1/top", "#first/hostile__task-1/0/turn-1"} <= links
    assert {link[1:] for link in links} <= ids | {"main"}
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)
    assert style is not None
    digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    assert f"sha256-{digest}" in html.unescape(text)


# --- a live run ------------------------------------------------------------------------------------------------------


def test_a_live_run_reports_its_changes_and_shows_them(tmp_path: Path) -> None:
    async def follow() -> list[str]:
        with RunDirectory.open(tmp_path / "live", {}) as directory:
            directory.write(trajectory("owner__repo-1"))
            run = Site([tmp_path]).runs()[0]
            assert run.index.totals(Filter()).rollouts == 1
            stream = changes(run.state, lambda: False, pause=0.01)
            events = [await anext(stream), await anext(stream)]
            directory.write(trajectory("owner__repo-2"))
            while not events[-1].startswith("event: change"):
                events.append(await anext(stream))
            assert run.index.totals(Filter()).rollouts == 2
            assert [row.instance_id for row in run.index.rows(Filter())] == ["owner__repo-1", "owner__repo-2"]
            return events

    events = asyncio.run(follow())
    assert events[:2] == ["retry: 2000\n\n", ":\n\n"]


@pytest.mark.slow
def test_ctrl_c_ends_the_server_and_its_streams(runs: Path) -> None:
    command = [sys.executable, "-m", "minisandbox", "view", str(runs), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "2 runs; Ctrl-C ends the server\n"
        url = process.stderr.readline().strip()
        browser = build_opener(HTTPCookieProcessor())
        assert browser.open(url).status == 200
        with browser.open(url.partition("?")[0] + "runs/first/events", timeout=60) as stream:
            assert stream.readline() == b"retry: 2000\n"
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
        assert process.stderr.read() == "minisandbox: interrupted; nothing was changed\n"


# --- numbers and texts -----------------------------------------------------------------------------------------------


def test_the_totals_of_a_run(runs: Path) -> None:
    index = RunIndex(runs / "first" / "rollouts.sqlite", readonly=True)
    totals = index.totals(Filter())
    assert (totals.rollouts, totals.tasks, totals.rewarded, totals.rewarded_tasks) == (5, 3, 4, 3)
    assert totals.reward == 0.25
    assert totals.interval == wilson(0.25, 3)
    assert {value: count for value, count, _ in index.counts("outcome", Filter())} == {
        "resolved": 1, "failed": 2, "failed in model": 1, "tampered": 1,
    }  # fmt: skip
    assert [task.instance_id for task in index.tasks(Filter())] == [
        "hostile__task-1",
        "owner__other-2",
        "owner__repo-1",
    ]
    assert index.neighbours("owner__repo-1", 0) == (("owner__other-2", 1), ("owner__repo-1", 1))
    assert index.stages(Filter())["model"] == 0.0
    index.close()


def test_the_interval_of_wilson() -> None:
    assert wilson(0.5, 0) is None
    assert wilson(0.0, 10) == pytest.approx((0.0, 0.2775), abs=1e-3)
    assert wilson(0.5, 100) == pytest.approx((0.4038, 0.5962), abs=1e-3)


@pytest.mark.parametrize(("instance_id", "repository"), [
    ("django__django-11099", "django/django"), ("pytest-dev__pytest-5262", "pytest-dev/pytest"),
    ("oauthlib__oauthlib.1fd52536.combine_file__0fceycuu", "oauthlib/oauthlib"), ("calc-1", "calc"), ("hello", "hello"),
    ("owner__scikit-learn-12", "owner/scikit-learn"), ("a__b", "a/b"),
])  # fmt: skip
def test_the_repository_of_an_id(instance_id: str, repository: str) -> None:
    assert repository_of(instance_id) == repository


def test_huge_texts_are_cut() -> None:
    text = "\n".join(f"line {number}" for number in range(100_000))
    part = excerpt(text, 10)
    assert part.head.splitlines()[-1] == "line 4"
    assert part.tail.splitlines()[0] == "line 99995"
    assert part.hidden == 99_990
    wide = excerpt("x" * 3_000_000)
    assert wide.is_cut
    assert len(wide.head) < 2_100
    assert not excerpt("short\n").is_cut
    assert visible("a\r\nb\tc\rd") == "a\nb\tc\\rd"


def test_a_growing_diff_marks_what_is_new() -> None:
    before = b"diff --git a/x b/x\n@@ -1 +1,2 @@\n-a\n+b\n"
    diff = diff_of(before + b"+c\n", before)
    assert [(line.kind, line.is_new) for line in diff.lines] == [
        ("file", False), ("hunk", False), ("removed", False), ("added", False), ("added", True),
    ]  # fmt: skip
    assert (diff.added, diff.removed, diff.hidden) == (2, 1, 0)
    assert diff_of(b"+x\n" * 1500).hidden == 500


def test_turns_have_their_commands_and_observations() -> None:
    step = StepRecord("ls", "exited", 0, None, b"x", b"", 0, 0, 0.1, 1)
    record = trajectory(
        steps=(step, replace(step, turn=2)), patches=(PatchRecord(1, PATCH), PatchRecord(2, None, "large"))
    )
    prompt, first, second = turns_of(record)
    assert [index for index, _ in prompt.observations] == [0, 1]
    assert [passage.text for passage in first.passages] == ["I look."]  # its block is the command
    assert [passage.is_code for passage in passages(record.messages[2].content)] == [False, True]
    assert ([index for index, _ in first.steps], [index for index, _ in second.steps]) == ([0], [1])
    assert first.diff is not None
    assert (first.diff.added, first.diff.removed) == (1, 1)
    assert second.patch is not None
    assert second.patch.detail == "large"
    alone = turns_of(replace(record, turns=(), messages=(), rows=(), patches=()))
    assert [len(turn.steps) for turn in alone] == [2]
    assert [passage.text for passage in passages("``` not closed")] == ["``` not closed"]


def test_tokens_are_coloured_by_their_probability() -> None:
    (row,) = trajectory().rows
    spans = token_spans(row, 0, None)
    sampled = [span for span in spans if span.level is not None]
    assert len(sampled) == sum(row.mask)
    assert {(span.level, span.has_loss) for span in sampled} == {(1, True)}
    assert spans[0].level is None


def test_nothing_is_loaded_from_other_hosts() -> None:
    for path in STATIC.iterdir():
        addresses = re.findall(r"(?:https?:)?//[a-z][^\s\"')]*", path.read_text(encoding="utf-8"))
        assert [address for address in addresses if "w3.org" not in address] == [], path
