"""The command line's frame: what it prints where, with which exit status, and at what cost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from minisandbox import errors
from minisandbox.agents import actions, edits, session  # noqa: F401 - they define errors
from minisandbox.cli.common import exits
from minisandbox.cli.common.output import clean_line, human_seconds, plain, print_table
from minisandbox.cli.common.sandbox_options import parse_limits
from minisandbox.cli.image.verbs import VERBS
from minisandbox.cli.main import COMMANDS, _split, describe, main, parser
from minisandbox.errors import clean
from minisandbox.spec import PythonRecipe
from minisandbox.trajectories import styles  # noqa: F401 - the same
from minisandbox.types import Outcome
from minisandbox.values import human_size

ROOT = Path(__file__).resolve().parents[2]
FIRST = "pytoolz__toolz-1.0.0.update_in"


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command as a user types it."""
    return subprocess.run(
        [sys.executable, "-m", "minisandbox", *words],
        capture_output=True, text=True, timeout=120, env={**os.environ, **variables}, check=False,
    )  # fmt: skip


# --- exit statuses ---------------------------------------------------------------------------------------------------


def error_classes(
    base: type[errors.MiniSandboxError] = errors.MiniSandboxError,
) -> Iterator[type[errors.MiniSandboxError]]:
    yield base
    for child in base.__subclasses__():
        yield from error_classes(child)


def documented() -> dict[int, str]:
    """The rows of the table in docs/reference/exit-codes.md."""
    rows = {}
    for line in (ROOT / "docs/reference/exit-codes.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[0].isdigit():
            rows[int(cells[0])] = cells[1].strip("`")
    return rows


def test_exit_statuses_are_documented() -> None:
    wanted = {c.exit_code: c.__name__ for c in error_classes() if c is not errors.MiniSandboxError}
    listed = documented()
    assert {code: name for code, name in listed.items() if code not in exits.MEANINGS} == wanted
    assert set(exits.MEANINGS) <= set(listed)


def test_exit_statuses_are_one_per_class() -> None:
    classes = [c for c in error_classes() if c is not errors.MiniSandboxError]
    codes = [c.exit_code for c in classes]
    assert len(set(codes)) == len(codes)
    assert not set(codes) & set(exits.MEANINGS)


def test_each_error_ends_with_its_status(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{\n", encoding="utf-8")
    assert run("tasks", "ls", str(bad)).returncode == errors.TaskFileError.exit_code
    assert run("tasks", "show", "quickstart", "nothing").returncode == errors.NotFound.exit_code
    assert run("sandbox", "run").returncode == errors.InvalidValue.exit_code
    assert run("tasks", "ls", "--unknown").returncode == exits.USAGE
    assert run("tasks", "ls").returncode == exits.OK


# --- messages --------------------------------------------------------------------------------------------------------


def test_an_error_has_three_parts_and_no_trace(tmp_path: Path) -> None:
    done = run("tasks", "ls", str(tmp_path / "missing.jsonl"))
    lines = done.stderr.splitlines()
    assert lines[0].startswith("minisandbox: ")
    assert "missing.jsonl" in lines[0]
    assert any(line.startswith("  likely reason: ") for line in lines)
    assert any(line.startswith("  what to do: ") for line in lines)
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_debug_shows_the_trace(tmp_path: Path) -> None:
    for words in (["--debug", "tasks", "ls"], ["tasks", "ls", "--debug"]):
        assert "Traceback" in run(*words, str(tmp_path / "missing.jsonl")).stderr


def test_every_line_of_a_reason_is_indented() -> None:
    error = errors.BuildError("step x failed", reason="first\nsecond", hint="look", log=Path("a.log"))
    assert describe(error) == [
        "minisandbox: step x failed",
        "  likely reason: first",
        "    second",
        "  what to do: look",
        "  log: a.log",
    ]


def test_a_refusal_of_the_system_is_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("x", encoding="ascii")
    out = tmp_path / "file" / "run"
    code = main(["rollout", "quickstart", "--agent", "empty", "--only", "*toolz*", "--out", str(out)])
    assert code == exits.SYSTEM
    assert "file" in capsys.readouterr().err


def test_help_of_every_noun(capsys: pytest.CaptureFixture[str]) -> None:
    for noun in COMMANDS:
        with pytest.raises(SystemExit) as ended:
            main([noun, "--help"])
        assert ended.value.code == 0
        assert f"usage: minisandbox {noun}" in capsys.readouterr().out


def test_help_and_version_load_no_command() -> None:
    script = "import sys; from minisandbox.cli.main import parser; parser([]); print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    loaded = done.stdout
    assert "minisandbox.sandbox" not in loaded
    assert "'rich'" not in loaded
    assert run("--version").stdout.startswith("minisandbox ")


def test_a_noun_loads_its_own_module_only() -> None:
    script = "import sys; from minisandbox.cli.main import parser; parser(['tasks']); print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert "minisandbox.cli.tasks.verbs" in done.stdout
    assert "minisandbox.cli.sandbox" not in done.stdout
    assert "minisandbox.sandbox" not in done.stdout


IMAGE_VERBS = {"pull", "push", "build", "ls", "show", "pins", "verify", "rm", "gc", "export", "import"}


def test_the_verbs_of_images() -> None:
    assert set(VERBS) == IMAGE_VERBS


def test_a_verb_of_images_loads_its_own_module_only() -> None:
    script = "import sys; from minisandbox.cli.main import parser; parser(['image', 'gc']); print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert "minisandbox.cli.image.removal" in done.stdout
    assert "minisandbox.cli.image.build" not in done.stdout
    assert "minisandbox.images.builder" not in done.stdout


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = [sys.executable, "-m", "minisandbox", "tasks", "ls", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == exits.BROKEN_PIPE


def test_closed_and_full_outputs() -> None:
    command = f"{sys.executable} -m minisandbox tasks ls"
    for redirection, status in ((">&-", 0), (">&- 2>&-", 0), ("2>&-", 0), ("> /dev/full", exits.SYSTEM)):
        done = subprocess.run(["bash", "-c", f"{command} {redirection}"], capture_output=True, timeout=60, check=False)
        assert done.returncode == status, (redirection, done.stderr)
        assert b"Exception ignored" not in done.stderr


def test_progress_survives_its_reader() -> None:
    script = (
        "import sys\nfrom minisandbox.cli.common.output import Progress, say\n"
        "sys.stdin.readline()\nwith Progress() as progress: progress.note('x'); say('y')\nprint('done')"
    )
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", script], **streams) as process:  # type: ignore[call-overload]
        process.stderr.close()
        process.stdin.write(b"\n")
        process.stdin.close()
        assert process.stdout.read() == b"done\n"


def test_what_cannot_be_encoded_is_printed_all_the_same(tmp_path: Path) -> None:
    row = json.loads(run("tasks", "show", "quickstart", FIRST, "--json").stdout)
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps({**row, "problem_statement": "\N{SNOWMAN}"}), encoding="utf-8")
    done = run("tasks", "show", str(path), FIRST, PYTHONIOENCODING="latin-1")
    assert done.returncode == 0, done.stderr
    assert "\\u2603" in done.stdout


@pytest.mark.parametrize(
    ("number", "status", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_an_interrupted_command_says_what_was_kept(number: int, status: int, word: str) -> None:
    # stands for any command: it waits in main, with a noun's own words about what is kept
    script = (
        "import sys, time, minisandbox.cli.tasks.verbs as t\n"
        "def wait(args):\n"
        "    args.kept = 'all is kept'; print('up', flush=True); time.sleep(60)\n"
        "t.run_ls = wait\n"
        "from minisandbox.cli.main import main; sys.exit(main(['tasks', 'ls']))"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"up\n"
        process.send_signal(number)
        assert process.stderr.read().decode() == f"minisandbox: {word}; all is kept\n"
        assert process.wait(60) == status


# --- output ----------------------------------------------------------------------------------------------------------


def test_json_is_one_document_and_nothing_else() -> None:
    done = run("tasks", "ls", "--json")
    rows = json.loads(done.stdout)
    assert done.stderr == ""
    assert len(rows) >= 8
    assert {"instance_id", "repo", "form", "FAIL_TO_PASS"} <= set(rows[0])
    row = json.loads(run("tasks", "show", "quickstart", rows[0]["instance_id"], "--json").stdout)
    assert row["patch"].startswith(("diff ", "--- "))


def test_a_table_has_one_line_per_task_where_stdout_is_no_terminal() -> None:
    done = run("tasks", "ls", COLUMNS="30")
    assert len(done.stdout.splitlines()) == 1 + len(json.loads(run("tasks", "ls", "--json").stdout))
    assert all(line == line.rstrip() for line in done.stdout.splitlines())


def test_what_is_hidden_from_the_agent_is_shown() -> None:
    row = json.loads(run("tasks", "show", "quickstart", FIRST, "--json").stdout)
    assert row["form"] == "swesmith"
    shown = run("tasks", "show", "quickstart", FIRST).stdout
    assert f"hidden from the agent: {row['FAIL_TO_PASS'][0].partition('::')[0]}" in shown


def test_data_cannot_steer_the_terminal(tmp_path: Path) -> None:
    assert "\x1b" not in clean("\x1b[31mred\x07\x9b")
    assert clean("tab\tline\n") == "tab\tline\n"
    assert clean("a\u202eb\u2066c").isprintable()
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"instance_id": "\\u001b[2J"}', encoding="ascii")
    assert "\x1b" not in run("tasks", "ls", str(path)).stderr


def test_plain_values() -> None:
    value = {"o": Outcome.TIMEOUT, "p": Path("a/b"), "b": b"\xff", "t": (1, None), "e": errors.InvalidValue.exit_code}
    assert plain(value) == {"o": "timeout", "p": "a/b", "b": "\N{REPLACEMENT CHARACTER}", "t": [1, None], "e": 3}


def test_sizes_and_seconds_for_people() -> None:
    assert [human_size(n) for n in (0, 1023, 1024, 5 << 20, 3 << 40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "5.0 MiB",
        "3.0 TiB",
    ]
    assert [human_seconds(s) for s in (0.0083, 1.25, 61)] == ["8 ms", "1.2 s", "1 min 1 s"]


# --- options ---------------------------------------------------------------------------------------------------------


def test_limits() -> None:
    limits = parse_limits(["disk=64M", "processes=7"])
    assert (limits.disk, limits.processes) == (64 << 20, 7)
    for text in ("disk", "disk=", "=1", "disk=much", "processes=1.5", "processes=0", "colour=red"):
        with pytest.raises(errors.InvalidValue, match=r"disk|processes|limit"):
            parse_limits([text])


@pytest.mark.parametrize(
    "words",
    [
        ("validate", "quickstart", "--runs", "0"),
        ("validate", "quickstart", "--timeout", "nan"),
        ("rollout", "quickstart", "--agent", "empty", "--workers", "0"),
        ("image", "build", "quickstart", "--jobs", "-1"),
        ("image", "build", "quickstart", "--name", "x"),
        ("image", "build", "x.toml", "--only", "x"),
        ("quickstart", "--workers", "0"),
    ],
)
def test_values_are_checked_before_any_work(words: tuple[str, ...], tmp_path: Path) -> None:
    done = run(*words, MINISANDBOX_STORE=str(tmp_path / "store"))
    assert done.returncode == errors.InvalidValue.exit_code, done.stderr
    assert words[-2] in done.stderr
    assert not (tmp_path / "store").exists()


def test_fresh_removes_runs_and_nothing_else(tmp_path: Path) -> None:
    from minisandbox.cli.quickstart import _forget_rollouts  # noqa: PLC0415 - loads the sandbox

    (tmp_path / "oracle/trajectories").mkdir(parents=True)
    (tmp_path / "oracle/run.json").write_text("{}", encoding="ascii")
    kept = [tmp_path / "thesis.tex", tmp_path / "empty/not-a-run"]
    kept[1].parent.mkdir()
    for path in kept:
        path.write_text("x", encoding="ascii")
    _forget_rollouts(tmp_path)
    assert all(path.exists() for path in kept)
    assert not (tmp_path / "oracle").exists()


def test_a_failure_names_the_task_or_the_file(tmp_path: Path) -> None:
    row = json.loads(run("tasks", "show", "quickstart", FIRST, "--json").stdout)
    row["build"]["python"] = "9.99"
    (tmp_path / "tasks.jsonl").write_text(json.dumps(row), encoding="utf-8")
    (tmp_path / "recipe.toml").write_text('python = "9.99"', encoding="utf-8")
    for name, subject in (("tasks.jsonl", FIRST), ("recipe.toml", "recipe.toml")):
        done = run("image", "build", str(tmp_path / name), MINISANDBOX_STORE=str(tmp_path / "store"))
        assert done.returncode == errors.InterpreterNotFound.exit_code, done.stderr
        said = [line for line in done.stderr.splitlines() if line.startswith("minisandbox: ")]
        assert len(said) == 1
        assert subject in said[0]
        assert "9.99" in said[0]


def test_what_follows_two_dashes_belongs_to_the_command() -> None:
    args = parser(["sandbox"]).parse_args(["sandbox", "run", "--timeout", "3"])
    assert args.timeout == 3.0
    done = run("sandbox", "run", "--limit", "nonsense=1", "--", "ls", "--debug", "--help")
    assert done.returncode == errors.InvalidValue.exit_code
    assert "Traceback" not in done.stderr
    done = run("--debug", "sandbox", "run", "--limit", "nonsense=1", "--", "ls", "--debug")
    assert "Traceback" in done.stderr
    assert _split(["--debug", "sandbox", "run", "--", "ls", "--debug", "--"]) == (
        ["--debug", "sandbox", "run"],
        ["ls", "--debug", "--"],
    )
    assert _split(["sweagent", "--", "run", "--help"]) == (["sweagent"], ["run", "--help"])


RECIPES = {
    "": None,
    'python = "3.11"\nrequirements = ["attrs==23.1.0"]\n': None,
    'pithon = "3.11"\n': "'pithon' is unknown",
    "python = 3.11\n": "'python'",
    "python =\n": "not TOML",
    'python = "banana"\n': "'banana' is not a Python version",
    'python = "3.11"\nrequirements = ["foo bar"]\n': "'foo bar' is not a requirement",
    '[source.git]\nurl = "x"\n': "commit",
}


@pytest.mark.parametrize(("text", "complaint"), RECIPES.items())
def test_recipe_files(text: str, complaint: str | None, tmp_path: Path) -> None:
    from minisandbox.tasks import read_recipe  # noqa: PLC0415 - loads the sandbox

    path = tmp_path / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    if complaint is None:
        assert isinstance(read_recipe(path), PythonRecipe)
        return
    with pytest.raises(errors.InvalidValue, match=complaint) as caught:
        read_recipe(path)
    assert "recipe.toml" in str(caught.value)


def test_a_name_from_inside_stays_in_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    name = "a\nminisandbox: all is well\x1b[2J"
    assert clean_line(name).isprintable()
    [line] = describe(errors.FileAccessError(f"cannot download {name}: no", path=name))
    assert line == clean_line(f"minisandbox: cannot download {name}: no")
    print_table(["file"], [[name]])
    assert len(capsys.readouterr().out.splitlines()) == 2
