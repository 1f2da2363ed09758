"""The journeys' commands run in the order of their page, as a reader types them.

A command that needs a GPU, a hub, GitHub or another machine has a stand-in, with its reason. Every other one runs
unchanged. A stand-in that no command of the page matches fails, and so does a command that ends with another status.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.scripted_server import ScriptedServer, serving

from minisandbox.store import remove_tree
from minisandbox.tasks import TaskSet

pytestmark = [pytest.mark.kernel, pytest.mark.index, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
MUTATIONS = ROOT / "examples" / "learning" / "data" / "mutations-train.jsonl"
JOURNEYS = ROOT / "docs" / "journeys"
BLOCKS = ROOT / "tests" / "agents" / "blocks.toml"
CONSOLE = re.compile(r"```console\n(.*?)```", flags=re.DOTALL)
PYTHON = re.compile(r"```py\n(.*?)```", flags=re.DOTALL)
PROMPT = re.compile(r"^[a-z]*\$ ", flags=re.MULTILINE)
"""With the name of the machine, where there are several."""
PATIENCE = 570.0
ADDRESS = "http://localhost:8000/v1"
FIRST, SECOND = "pytoolz__toolz-1.0.0.update_in", "pytoolz__toolz-1.0.0.outer_join"
FIX = "sed -i 's/func(d.k.) if k in d else default/func(d[k] if k in d else default)/' toolz/dicttoolz.py"
SUBMIT = "Done.\n\n```submit\n```"
ORDINAL = "jpvanhal__inflection-0.5.1.ordinal_hundreds"
ORDINAL_FIX = "sed -i 's/number in .11/number % 100 in (11/' inflection/__init__.py"


@dataclass(frozen=True, slots=True)
class StandIn:
    """What runs in the place of a command.

    Attributes:
        pattern: the commands that it is for, from their beginning.
        command: what runs instead; ``\\1`` is a group of the pattern.
        why: what this machine lacks.
    """

    pattern: str
    command: str
    why: str


@dataclass(frozen=True, slots=True)
class Step:
    """A command of a page, and the output that the page shows."""

    command: str
    shown: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Journey:
    """What a page needs to run here.

    Attributes:
        stand_ins: for commands that cannot run.
        before: commands that an earlier page has.
        files: names of files, each made of the page's next ``py`` block.
    """

    stand_ins: tuple[StandIn, ...]
    before: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


INSTALLED = StandIn(r"(python3\S* -m venv|pip install) .*", "true", "the package under test is installed already")
NO_TORCH = "torch is an extra: the configuration is resolved; tests/unit/test_train_*.py train"
BUGS = "pytoolz__toolz-1.0.0.C*"
PAGES: Mapping[str, Journey] = {
    "swe-bench-verified.md": Journey(
        (
            INSTALLED,
            StandIn(r"for version in .*", "minisandbox doctor --pythons", "uv fetches interpreters from GitHub"),
            StandIn(r"git clone .*", "mkdir -p SWE-bench/swebench/resources/swebench-og", "GitHub"),
            StandIn(
                r"minisandbox tasks filter hub:\S+ --pins pins (.*)",
                r"minisandbox tasks filter quickstart --pins pins --only '*toolz*' \1",
                "the hub; bundled rows take the same commands",
            ),
            StandIn(
                r"(.*) --only psf__requests-1142 --only pallets__flask-5014(.*)",
                rf"\1 --only {FIRST} --only {SECOND}\2",
                "the rows' repositories are on GitHub",
            ),
            StandIn(r"vllm serve .*", "true", "a GPU; a scripted server answers at its address"),
            StandIn(r"(minisandbox trajectories show runs/first) psf__requests-1142", rf"\1 {FIRST}", "as above"),
        )
    ),
    "rl-on-one-node.md": Journey(
        (
            INSTALLED,
            StandIn(r"git clone .*", "mkdir -p SWE-smith-envs/env", "GitHub"),
            StandIn(
                r"minisandbox tasks filter hub:\S+ (.*) --range 0:2000 -o smith.jsonl",
                rf"minisandbox tasks filter {MUTATIONS} \1 --only '{BUGS}' --range 0:4 -o smith.jsonl",
                "the hub; bugs of the same form",
            ),
            StandIn(
                r"(minisandbox tasks filter smith.jsonl .*) --split train=0.95 --split test=0.05 (.*)",
                r"\1 --split train=0.5 --split test=0.5 \2",
                "four rows instead of 2,000: one part would be empty",
            ),
            StandIn(r"minisandbox train (sft|rl) (.*)", r"minisandbox train \1 \2 --print-config", NO_TORCH),
        )
    ),
    "rl-with-skyrl.md": Journey(
        (
            INSTALLED,
            StandIn(r"ray start .*", "true", "a second machine; tests/cluster has three nodes"),
            StandIn(
                r"python -m skyrl\S+ .*",
                "minisandbox rollout data/skyrl/train.parquet --agent oracle -o runs/skyrl/train/step-1",
                "SkyRL and GPUs: the oracle's rollouts are its first step; `make test-skyrl` has the rest",
            ),
            StandIn(r"(minisandbox trajectories show \S+) INSTANCE_ID", rf"\1 {FIRST}", "the reader fills in a name"),
        ),
        before=(
            "mkdir pins",
            f"minisandbox tasks filter quickstart --only {FIRST} -o valid-train.jsonl",
            f"minisandbox tasks filter quickstart --only {SECOND} -o valid-test.jsonl",
        ),
    ),
    "train-a-command-line-agent.md": Journey(
        (
            INSTALLED,
            StandIn(
                r"(minisandbox rollout .*) --agent command:codex (.*)",
                rf"\1 --agent command:{BLOCKS} \2",
                "570 MB; `make test-agents` runs the real one",
            ),
        )
    ),
    "your-own-dataset.md": Journey((), files=("make_task.py",)),
}  # fmt: skip


def steps(page: Path) -> Iterator[Step]:
    """The commands of a page's console blocks, in order."""
    for block in CONSOLE.findall(page.read_text(encoding="utf-8")):
        for part in PROMPT.split(block)[1:]:
            command, *shown = part.splitlines()
            yield Step(command, tuple(shown))


def replaced(command: str, stand_ins: tuple[StandIn, ...]) -> tuple[str, set[StandIn]]:
    used = set()
    for one in stand_ins:
        match = re.fullmatch(one.pattern, command)
        if match:
            command = match.expand(one.command)
            used.add(one)
    return command, used


def headings(shown: tuple[str, ...]) -> Iterator[str]:
    """The lines of a shown output that are the same for all tasks and machines: those without a number or an id."""
    for line in shown:
        if line.strip() not in ("", "...") and not re.search(r"[0-9_/]", line):
            yield " ".join(line.split())


def answers() -> dict[str, list[str]]:
    """What the scripted model answers: it solves one task and the bugs, and submits nothing for the others."""
    scripts = {FIRST: [f"I repair it.\n\n```bash\n{FIX}\n```", SUBMIT], "*": [SUBMIT]}
    scripts[ORDINAL] = [f"I repair it.\n\n```bash\n{ORDINAL_FIX}\n```", "Done."]
    for task in TaskSet.load(MUTATIONS).select([BUGS]):
        undo = f"git apply -R - <<'END'\n{task.patch.rstrip()}\nEND"
        scripts[task.instance_id] = [f"I take the bug out.\n\n```bash\n{undo}\n```", SUBMIT]
    return scripts


class Reader:
    """Somebody who types a page's commands, in a directory and with a store of their own."""

    def __init__(self, page: str, root: Path, store: Path, server: str) -> None:
        self.stand_ins = PAGES[page].stand_ins
        self.steps = tuple(steps(JOURNEYS / page))
        self.before = PAGES[page].before
        self.where = root / "reader"
        self.server = server
        self.done, self.broken = 0, ""
        self.used: set[StandIn] = set()
        programs = root / "bin"
        for directory in (self.where, programs):
            directory.mkdir()
        for name, words in (("minisandbox", "-m minisandbox"), ("python", "")):
            (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n', encoding="utf-8")
            (programs / name).chmod(0o755)
        found = PYTHON.findall((JOURNEYS / page).read_text(encoding="utf-8"))
        for name, text in zip(PAGES[page].files, found, strict=False):
            (self.where / name).write_text(text, encoding="utf-8")
        self.environment = {
            **os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "MINISANDBOX_STORE": str(store),
        }  # fmt: skip

    def reach(self, number: int) -> None:
        """Type the commands up to this one, without those that were typed before."""
        assert not self.broken, f"an earlier command failed: {self.broken}"
        while self.before:
            self.run(self.before[0])
            self.before = self.before[1:]
        while self.done <= number:
            step = self.steps[self.done]
            self.broken = step.command
            command, used = replaced(step.command, self.stand_ins)
            self.used |= used
            printed = self.run(command.replace(ADDRESS, self.server))
            words = " ".join(printed.split())
            missing = [line for line in headings(step.shown) if line not in words]
            assert not missing, f"{step.command}\n{printed}"
            self.done, self.broken = self.done + 1, ""

    def run(self, command: str) -> str:
        done = subprocess.run(
            ["bash", "-c", command], cwd=self.where, env=self.environment, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=PATIENCE, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stderr}\n{done.stdout}"
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Reader]]:
    """One reader for each page, made when it is asked for."""
    found: dict[str, Reader] = {}
    store = tmp_path_factory.mktemp("journeys") / "store"
    with serving(ScriptedServer(answers())) as server:

        def reader(page: str) -> Reader:
            if page not in found:
                found[page] = Reader(page, tmp_path_factory.mktemp("journey"), store, server.url)
            return found[page]

        yield reader
    if store.exists():
        remove_tree(store)


STEPS = [
    pytest.param(page, number, id=f"{page}-{number}")
    for page in PAGES
    for number, _ in enumerate(steps(JOURNEYS / page))
]


@pytest.mark.parametrize(("page", "number"), STEPS)
def test_commands_run_in_the_order_of_the_page(page: str, number: int, readers: Callable[[str], Reader]) -> None:
    readers(page).reach(number)


@pytest.mark.parametrize("page", PAGES)
def test_each_stand_in_has_its_command(page: str) -> None:
    used = [replaced(step.command, PAGES[page].stand_ins)[1] for step in steps(JOURNEYS / page)]
    assert set().union(*used) == set(PAGES[page].stand_ins)


def test_the_model_and_the_report_agree(readers: Callable[[str], Reader]) -> None:
    reader = readers("swe-bench-verified.md")
    reader.reach(len(reader.steps) - 1)
    report = json.loads((reader.where / "evaluation" / "report.json").read_text(encoding="utf-8"))
    assert report["resolved_ids"] == [FIRST]


def test_every_journey_is_run() -> None:
    assert {path.name for path in JOURNEYS.glob("*.md")} == set(PAGES)
