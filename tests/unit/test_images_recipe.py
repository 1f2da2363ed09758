"""Recipes refuse what cannot work, before anything is made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path, PurePosixPath

import pytest

from minisandbox.errors import InvalidValue, MiniSandboxError, PatchError, SourceError
from minisandbox.images.plan import Planner
from minisandbox.images.sources.localsource import SourceSnapshot, take_snapshot
from minisandbox.spec import (
    CheckOut,
    CutHistory,
    GitSource,
    HiddenTests,
    Install,
    InstallPython,
    InstallRequirements,
    InstallSystem,
    LocalSource,
    OciBase,
    PythonRecipe,
    PythonRequest,
    Recipe,
    Run,
    SdistSource,
)
from minisandbox.store import Store

HERE = LocalSource(Path())
PATCH = "diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n"


@pytest.mark.parametrize("text", ["", "three", "3", "3.11.x", ">=", "3.11;", "py3.11", "../3.11"])
def test_versions_that_are_none(text: str) -> None:
    with pytest.raises(InvalidValue, match="not a Python version"):
        PythonRecipe(python=text).recipe()


@pytest.mark.parametrize(
    ("text", "yes", "no"),
    [
        ("3.11", "3.11.0 3.11.14", "3.1.1 3.12.0 3.10.9"),
        ("3.11.7", "3.11.7", "3.11.70 3.11.8"),
        (">=3.11,<3.14", "3.11.0 3.13.5", "3.10.1 3.14.0"),
        ("2.7", "2.7.18", "3.7.2"),
        ("3.14.0rc1", "3.14.0rc1", "3.14.0"),
    ],
)
def test_what_a_request_accepts(text: str, yes: str, no: str) -> None:
    request = PythonRequest.parse(text)
    assert all(request.accepts(version) for version in yes.split())
    assert not any(request.accepts(version) for version in no.split())


@pytest.mark.parametrize("text", ["", "3", "three", "3.11." + "1" * 5000, ">=3." + "1" * 5000], ids=len)
def test_what_is_no_request(text: str) -> None:
    with pytest.raises(InvalidValue, match="Python version"):
        PythonRequest.parse(text)


@pytest.mark.parametrize("line", ["-e .", "--index-url x", "-r file", "/etc/passwd", "a b", "a==", "a\nb", ""])
def test_requirements_that_are_none(line: str) -> None:
    with pytest.raises(InvalidValue, match="not a requirement"):
        PythonRecipe(python="3.11", requirements=(line,)).recipe()


def test_parts_that_need_each_other() -> None:
    with pytest.raises(InvalidValue, match="without an interpreter"):
        PythonRecipe(requirements=("attrs==1",)).recipe()
    for changes in ({"install": ("x",)}, {"patch": PATCH}, {"hidden": ("a",)}, {"test_patch": PATCH}):
        with pytest.raises(InvalidValue, match="need a source"):
            PythonRecipe(**changes).recipe()


@pytest.mark.parametrize(("name", "version"), [("a b", "1"), ("", "1"), ("attrs", ""), ("attrs", "1 0")])
def test_archives_that_are_none_say_how_to_name_one(name: str, version: str) -> None:
    with pytest.raises(InvalidValue, match=r"is not a (project's name|version of attrs).*write it"):
        CheckOut(SdistSource(name, version, "0" * 64))


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../x", "a/../b", ".git/config", "a\0b", "a\nb"])
def test_hidden_paths_stay_inside(path: str) -> None:
    with pytest.raises(InvalidValue, match="not a path in the repository"):
        PythonRecipe(source=HERE, hidden=(path,)).recipe()


@pytest.mark.parametrize("pair", [("A=B", "x"), ("", "x"), ("1A", "x"), ("A", "x\0y")])
def test_variables_that_are_none(pair: tuple[str, str]) -> None:
    with pytest.raises(InvalidValue, match="environment variable"):
        PythonRecipe(environment=(pair,)).recipe()


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan")])
def test_timeouts_are_positive(timeout: float) -> None:
    with pytest.raises(InvalidValue, match="step_timeout"):
        PythonRecipe(step_timeout=timeout).recipe()


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        ("diff --git a/m b/m\nnew file mode 160000\nindex 0000000..1234567\n", "submodule"),
        (PATCH.replace("+b", "+\0"), "NUL"),
        ("please add two numbers", "not a unified diff"),
        (PATCH.replace("\n", "\r\n"), "CRLF"),
        (PATCH.rstrip("\n"), "no newline"),
        (PATCH.replace("b/", "b/../"), r"leaves the repository"),
        ("--- /etc/passwd\n+++ /etc/passwd\n@@ -1 +1 @@\n-a\n+b\n", "absolute"),
    ],
)
def test_patches_that_are_refused(patch: str, message: str) -> None:
    with pytest.raises(PatchError, match=message):
        PythonRecipe(source=HERE, patch=patch).recipe()
    with pytest.raises(PatchError, match=f"test_patch.*{message}"):
        PythonRecipe(source=HERE, test_patch=patch).recipe()


def test_a_patch_of_a_file_with_crlf_is_left_alone() -> None:
    patch = PATCH.replace("-a\n+b\n", "-a\r\n+b\r\n")
    assert PythonRecipe(source=HERE, patch=patch).patch == patch


@pytest.mark.parametrize("sha256", ["", "0" * 63, "g" * 64, "A" * 64])
def test_hashes_are_checked(sha256: str) -> None:
    with pytest.raises(InvalidValue, match="sha256"):
        CheckOut(SdistSource("a", "1", sha256))


@pytest.mark.parametrize(("name", "version"), [("", "1"), ("../a", "1"), ("a", ""), ("a", "1/2"), ("-a", "1")])
def test_projects_are_checked(name: str, version: str) -> None:
    with pytest.raises(InvalidValue):
        CheckOut(SdistSource(name, version, "0" * 64))


@pytest.mark.parametrize(
    ("url", "commit"),
    [("", "0" * 40), ("--upload-pack=x", "0" * 40), ("ext::sh", "0" * 40), ("u", "HEAD"), ("u", "0" * 39)],
)
def test_git_sources_are_checked(url: str, commit: str) -> None:
    with pytest.raises(InvalidValue):
        CheckOut(GitSource(url, commit))


def test_a_file_of_a_terabyte_is_no_source(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(SourceError, match="too large for a source"):
        take_snapshot(LocalSource(tmp_path))


@pytest.mark.parametrize("url", [" {}", "\n{}", "{}\t", "\x1f{}", "{}\x7f", "fi\nle://{}", " file://{}", "{}\u00a0"])
def test_an_address_means_one_thing(url: str) -> None:
    """What urllib drops of it would have it named like another one, of which there may be a mirror."""
    with pytest.raises(InvalidValue, match=r"is not a repository's URL or path.*write https://HOST/OWNER/NAME"):
        CheckOut(GitSource(url.format("/mine/private"), "0" * 40))
    assert GitSource("/mine/of two words", "0" * 40).url == "/mine/of two words"


def test_a_directory_of_many_images_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source/file").write_text("text\n")
    taken: list[LocalSource] = []

    def counted(source: LocalSource) -> SourceSnapshot:
        taken.append(source)
        return take_snapshot(source)

    monkeypatch.setattr("minisandbox.images.sources.localsource.take_snapshot", counted)
    planner = Planner(Store.open(tmp_path / "store"))
    recipe = PythonRecipe(source=LocalSource(tmp_path / "source"))
    assert planner.plan("one", recipe).layers == planner.plan("two", recipe).layers
    assert taken == [LocalSource(tmp_path / "source")]


@pytest.mark.parametrize(
    "make",
    [
        lambda: InstallRequirements(("--index-url=http://other",)),
        lambda: InstallPython("python"),
        lambda: InstallSystem(("-o=x",)),
        lambda: Install(("true",), network="moon"),
        lambda: CutHistory(hidden=("../x",)),
        lambda: HiddenTests(test_patch="--- a/../x\n+++ b/../x\n@@ -1 +1 @@\n-a\n+b\n"),
        lambda: Run(()),
        lambda: Recipe(steps=(InstallRequirements(("attrs",)),)),
        lambda: Recipe(steps=(CutHistory(),)),
        lambda: Recipe(OciBase("debian"), (InstallSystem(("gcc",)),)),
        lambda: Recipe(workdir=PurePosixPath("testbed")),
    ],
)
def test_steps_check_what_they_are_given(make: Callable[[], object]) -> None:
    with pytest.raises(MiniSandboxError):
        make()
