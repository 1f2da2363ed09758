"""What else nodes do: validations, evaluations, agents whose tokens a proxy on another node captures."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests import waiting
from tests.builds import python_build
from tests.cluster.cluster_tools import begin, clean_hosts, live, make_tasks
from tests.cluster.hosts import Hosts

DEADLINE = 900.0
IMAGES = 3
_ENGINE = """
import asyncio, sys
from pathlib import Path
from tests.builds import python_build
from minisandbox.models import Script, ScriptedModel
from minisandbox.models.engine import EngineServer

async def main():
    script = Script.load(Path(sys.argv[1]))
    async with EngineServer(ScriptedModel(script, name="scripted", tokens=True), host=sys.argv[2], port=8100):
        print("ready", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("work")
    tasks = make_tasks(found, IMAGES)
    broken = replace(tasks[1], instance_id="calc__cluster-broken", build=replace(python_build(tasks[1]), python="9.9"))
    rows = [task.to_row() for task in (*tasks, broken)]
    (found / "validated.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return found


@pytest.fixture(scope="module")
def cluster(place: Path) -> Iterator[Hosts]:
    with clean_hosts(place, 2, 2) as found:
        yield found


def done(cluster: Hosts, place: Path, run: str, *words: str) -> str:
    """What one of our commands prints on the first host, and its exit status."""
    with begin(cluster, place, run, sys.executable, "-m", "minisandbox", *words) as running:
        code = running.wait(DEADLINE)
    printed = (place / f"{run}.out").read_text()
    assert code in (0, 1, 30), printed + (place / f"{run}.err").read_text()
    return f"{code} {printed}"


def report(text: str) -> dict[str, tuple[str, str | None]]:
    """What a validation says of each task."""
    code, _, body = text.partition(" ")
    assert code == "30", text
    return {one["instance_id"]: (one["verdict"], one["cause"]) for one in json.loads(body)["results"]}


def test_a_validation_says_what_it_says_on_one_node(place: Path, cluster: Hosts) -> None:
    tasks = str(place / "validated.jsonl")
    here = report(done(cluster, place, "here", "validate", tasks, "--json"))
    there = report(done(cluster, place, "there", "validate", tasks, "--json", "--cluster", cluster.head))
    assert there == here
    assert set(here.values()) >= {("valid", None), ("error", "not_built")}
    waiting.until(lambda: not live())


def test_an_evaluation_goes_on_with_or_without_the_cluster(place: Path, cluster: Hosts) -> None:
    words = ("evaluate", str(place / "tasks.jsonl"), "-p", "gold", "-o", str(place / "graded"))
    first = done(cluster, place, "first", *words, "--cluster", cluster.head)
    assert f"{IMAGES} of {IMAGES} tasks resolved" in first
    assert "done; " in first
    again = done(cluster, place, "again", *words, "--cluster", cluster.head, "--json")
    assert again.startswith("0 ")
    here = done(cluster, place, "alone", *words, "--json")
    assert json.loads(here[2:]) == json.loads(again[2:])
    waiting.until(lambda: not live())


def test_agents_on_all_nodes_are_captured_by_one_proxy(place: Path, cluster: Hosts) -> None:
    """An agent of others, on another node, has the proxy's address and a key of its own for each rollout."""
    script = place / "script.json"
    script.write_text(json.dumps(["hello"]))
    first, other = cluster.all
    engine = first.popen(sys.executable, "-c", _ENGINE, str(script), first.address, out=subprocess.PIPE)
    assert engine.stdout is not None
    assert engine.stdout.readline() == "ready\n"
    proxy = first.popen(
        sys.executable, "-m", "minisandbox", "model", "proxy", "--api-base", f"http://{first.address}:8100/v1",
        "--host", "0.0.0.0", "--address", first.address, "--port", "9000", "--out", str(place / "rows.jsonl"),
        out=subprocess.PIPE,
    )  # fmt: skip
    assert proxy.stdout is not None
    base = proxy.stdout.readline().strip()
    assert base == f"http://{first.address}:9000/v1"
    for host, key in ((first, "ms-here"), (other, "ms-there")):
        ask = (
            "import json, sys, urllib.request as u\n"
            "body = {'model': 'scripted', 'messages': [{'role': 'user', 'content': 'who'}]}\n"
            "asked = u.Request(sys.argv[1] + '/chat/completions', json.dumps(body).encode(),\n"
            "    {'Authorization': 'Bearer ' + sys.argv[2], 'Content-Type': 'application/json'})\n"
            "print(json.load(u.urlopen(asked))['choices'][0]['message']['content'])\n"
        )
        with host.popen(sys.executable, "-c", ask, base, key, out=subprocess.PIPE) as asking:
            assert asking.communicate(timeout=DEADLINE)[0] == "hello\n"
    proxy.terminate()
    engine.kill()
    with proxy, engine:  # their ends, and the pipes'
        assert proxy.wait(DEADLINE) == 0
    rows = [json.loads(line) for line in (place / "rows.jsonl").read_text().splitlines()]
    assert {row["session"] for row in rows} == {"here", "there"}
    assert all(len(row["ids"]) == len(row["mask"]) > sum(row["mask"]) > 0 for row in rows)
