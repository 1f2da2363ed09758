"""What is installed in an image: real virtual environments in OCI layouts, and everything that an image may claim."""

from __future__ import annotations

import io
import json
import os
import shutil
import stat
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.unit.oci_tools import END, MadeImage, entry, link

from minisandbox.errors import NotFound
from minisandbox.images import Image, PythonEnvironment, pull, python_environments, read_pins
from minisandbox.images.python.index import find_uv
from minisandbox.images.python.installed import choose
from minisandbox.images.tree import ImageTree
from minisandbox.spec import PythonRecipe
from minisandbox.store import Store
from minisandbox.store.blobs.lower_layers import LowerLayers
from minisandbox.tasks.dialects.environments import exported

MINOR = f"{sys.version_info.major}.{sys.version_info.minor}"
SITE = "lib/python3.9/site-packages"
CONDA = "opt/miniconda3/envs/testbed"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store")


def taken(tmp_path: Path, store: Store, *tars: bytes, **config: object) -> Image:
    """Take an image of these layers in."""
    layout = MadeImage([tar + END for tar in tars], config).write_layout(tmp_path / "layout")
    return pull(f"oci:{layout}", store=store, name=tmp_path.name)


def packed(source: Path, name: str) -> bytes:
    """A directory as a layer at a path of the image."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        archive.add(source, name)
    return data.getvalue().rstrip(b"\0").ljust(-(-len(data.getvalue().rstrip(b"\0")) // 512) * 512, b"\0")


def files(of: Mapping[str, str]) -> bytes:
    """A layer of these files."""
    return b"".join(entry(name, text.encode()) for name, text in of.items())


def installed(prefix: str, *pins: str, site: str = SITE, **more: str) -> dict[str, str]:
    """The metadata of distributions below a prefix; files of theirs by name."""
    found = {}
    for name, version in (pin.split("==") for pin in pins):
        info = f"{prefix}/{site}/{name.replace('-', '_')}-{version}.dist-info"
        found[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n\nVersion: 0\n"
        found |= {f"{info}/{file}": text for file, text in more.items()}
    return found


def wheel(directory: Path, name: str, version: str) -> Path:
    """A wheel of one module."""
    path = directory / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    texts = {
        f"{name}.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in {**texts, f"{info}/RECORD": "".join(f"{one},,\n" for one in texts)}.items():
            archive.writestr(file, text)
    return path


@pytest.mark.slow
def test_a_real_virtual_environment_says_what_pip_freeze_says(tmp_path: Path, store: Store) -> None:
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    wheel(tmp_path, "from_index", "1.0")
    project, cloned = tmp_path / "project", tmp_path / "cloned"
    for path in (project, cloned):
        path.mkdir()
        build = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        (path / "pyproject.toml").write_text(build)
        (path / "backend.py").write_text(BACKEND.format(name=path.name))
    git = ["git", "-C", str(cloned), "-c", "user.name=n", "-c", "user.email=e@localhost"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    environment = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}
    pip = [str(venv / "bin/python"), "-I", "-m", "pip"]
    install = ["install", "-q", "--no-build-isolation", "from_index", "-e", str(project), f"git+{cloned.as_uri()}"]
    subprocess.run([*pip, *install], check=True, env=environment)
    frozen = subprocess.run([*pip, "freeze", "--all"], check=True, env=environment, capture_output=True, text=True)
    plain = {line for line in frozen.stdout.splitlines() if "==" in line and not line.startswith("#")}
    assert len(plain) >= 2

    image = taken(tmp_path, store, packed(venv, "opt/venv"), Env=["PATH=/opt/venv/bin:/usr/bin"])
    [found] = python_environments(image)
    assert (found.path, found.python) == ("/opt/venv", ".".join(map(str, sys.version_info[:3])))
    assert {pin.replace("-", "_") for pin in found.pins} == {pin.replace("-", "_") for pin in plain}
    reasons = dict(found.apart)
    assert reasons["project"] == f"editable installation of {project.as_uri()}"
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert reasons["cloned"] == f"installed from {cloned.as_uri()} at {commit}"
    assert set(reasons) == {"project", "cloned"}


BACKEND = """
import zipfile
def build_wheel(directory, settings=None, metadata=None):
    name = "{name}-1-py3-none-any.whl"
    with zipfile.ZipFile(directory + "/" + name, "w") as wheel:
        wheel.writestr("{name}-1.dist-info/METADATA", "Metadata-Version: 2.1\\nName: {name}\\nVersion: 1\\n")
        wheel.writestr("{name}-1.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("{name}-1.dist-info/RECORD", "")
    return name
build_editable = build_wheel
"""


def test_uvs_environment(tmp_path: Path, store: Store) -> None:
    venv = tmp_path / "venv"
    uv = str(find_uv())
    subprocess.run([uv, "venv", "-q", "--no-config", "--python", sys.executable, str(venv)], check=True)
    packages = [str(wheel(tmp_path, "one", "1.0"))]
    command = [uv, "pip", "install", "-q", "--no-config", "--offline", "--python", str(venv / "bin/python"), *packages]
    subprocess.run(command, check=True)
    image = taken(tmp_path, store, packed(venv, "testbed/.venv"), WorkingDir="/testbed")
    [found] = python_environments(image)
    assert (found.path, found.python.rpartition(".")[0]) == ("/testbed/.venv", MINOR)
    assert found.apart == (("one", f"installed from {(tmp_path / 'one-1.0-py3-none-any.whl').as_uri()}"),)


def conda_image() -> dict[str, str]:
    """As SWE-bench's images are: conda's own environment is the one in PATH, shells activate the other."""
    origin = json.dumps({"url": "file:///croot/numpy/work", "dir_info": {}})
    editable = json.dumps({"url": "file:///testbed", "dir_info": {"editable": True}})
    return {
        "opt/miniconda3/bin/python": "",
        f"opt/miniconda3/{SITE.replace('3.9', '3.12')}/x": "",
        "opt/miniconda3/conda-meta/python-3.12.4-h1_0.json": "{}",
        f"{CONDA}/bin/python": "",
        f"{CONDA}/conda-meta/python-3.9.20-h1_0.json": "{}",
        **installed(CONDA, "numpy==1.25.2", **{"direct_url.json": origin, "INSTALLER": "conda\n"}),
        **installed(CONDA, "Django==3.0", **{"direct_url.json": editable}),
        **installed(CONDA, "asgiref==3.8.1"),
        f"{CONDA}/{SITE}/old-2.0-py3.9.egg-info": "Metadata-Version: 1.0\nName: old\nVersion: 2.0\n",
        f"{CONDA}/{SITE}/egg.egg/EGG-INFO/PKG-INFO": "Name: egg\nVersion: 1.1\n",
        f"{CONDA}/{SITE}/linked.egg-link": "/src/linked\n.",
        f"{CONDA}/{SITE}/~umpy-1.25.1.dist-info/METADATA": "Name: umpy\nVersion: 1.25.1\n",
    }


def test_the_environment_that_conda_activates_as_pins(tmp_path: Path, store: Store) -> None:
    image = taken(tmp_path, store, files(conda_image()), Env=["PATH=/opt/miniconda3/bin:/bin"])
    found = python_environments(image)
    assert [(one.path, one.python) for one in found] == [("/" + CONDA, "3.9.20"), ("/opt/miniconda3", "3.12.4")]
    assert found[0].pins == ("asgiref==3.8.1", "egg==1.1", "numpy==1.25.2", "old==2.0")
    assert [name for name, _ in found[0].apart] == ["Django", "linked"]
    place = tmp_path / "pins/django__django/11066"
    place.mkdir(parents=True)
    (place / "environment.yml").write_text(found[0].to_yaml())
    pins = read_pins(place / "environment.yml")
    assert (pins.python, pins.requirements, pins.skipped) == ("3.9.20", found[0].pins, ())
    row = exported(tmp_path / "pins", "django__django", "11066")
    assert row == PythonRecipe("3.9", found[0].pins, complete=True)


def test_what_a_layer_above_says_counts(tmp_path: Path, store: Store) -> None:
    lower = {**installed("v", "a==1", "b==1", "c==1"), "v/pyvenv.cfg": "version = 3.9.1", "old/venv/pyvenv.cfg": ""}
    upper = (
        entry(f"v/{SITE}/.wh.a-1.dist-info") + files(installed("v", "a==2"))
        + entry(f"v/{SITE}/b-1.dist-info/.wh..wh..opq") + link("venv", "../../v")
    )  # fmt: skip
    image = taken(tmp_path, store, files(lower), upper, Env=["VIRTUAL_ENV=/venv", "PATH=/bin"])
    assert [(one.path, one.python, one.pins) for one in python_environments(image)] == [
        ("/venv", "3.9.1", ("a==2", "c==1"))
    ]


def test_debians_directories_and_the_users_own(tmp_path: Path, store: Store) -> None:
    made = {
        "usr/bin/python3.11": "",
        "usr/lib/python3.11/os.py": "",
        "var/lib/dpkg/status": "Package: x\nVersion: 1\n\nPackage: python3.11-minimal\nStatus: x\nVersion: 3.11.2-6\n",
        "etc/passwd": "app:x:1000:1000::/srv/app:/bin/sh\n",
        **installed("usr", "six==1.16.0", "chardet==5.1.0", site="lib/python3/dist-packages"),
        **installed("usr", "six==1.17.0", site="local/lib/python3.11/dist-packages"),
        **installed("srv/app", "chardet==5.2.0", site=".local/lib/python3.11/site-packages"),
    }
    tar = files(made) + link("usr/bin/python3", "python3.11") + link("bin", "usr/bin")
    image = taken(tmp_path, store, tar, User="app", Env=["PATH=/bin"])
    [found] = python_environments(image)
    user = "5.2.0" if os.geteuid() == 0 else "5.1.0"  # an ordinary user's sandbox runs commands as root
    assert (found.path, found.python) == ("/usr", "3.11.2")
    assert found.pins == (f"chardet=={user}", "six==1.17.0")


def test_system_packages_of_a_virtual_environment(tmp_path: Path, store: Store) -> None:
    made = {
        "usr/local/include/python3.9/patchlevel.h": '#define PY_VERSION      "3.9.5"\n',
        **installed("usr/local", "a==1", "b==1"),
        **installed("venv", "a==2"),
    }
    for allowed, pins in (("true", ("a==2", "b==1")), ("false", ("a==2",))):
        made["venv/pyvenv.cfg"] = f"home = /usr/local/bin\ninclude-system-site-packages = {allowed}\n"
        image = taken(tmp_path / allowed, store, files(made), Env=["VIRTUAL_ENV=/venv"])
        assert python_environments(image)[0] == PythonEnvironment("/venv", "3.9.5", pins, ())


def test_an_environment_is_chosen_by_its_path(tmp_path: Path, store: Store) -> None:
    made = {**installed("far/away/one", "a==1"), "far/away/one/pyvenv.cfg": "version = 3.9.1", "opt/two/bin/python": ""}
    made |= installed("opt/two", "b==1") | installed("opt/none", "c==1")
    image = taken(tmp_path, store, files(made))
    assert [one.path for one in python_environments(image)] == ["/opt/two"]
    found = python_environments(image, "/far/away/one")
    assert choose(image, found, "/far/away/one/").pins == ("a==1",)
    assert choose(image, found, "two") == choose(image, found)
    with pytest.raises(NotFound, match="no Python environment 'three'") as caught:
        choose(image, found, "three")
    assert caught.value.reason == "found: /opt/two, /far/away/one"
    with pytest.raises(NotFound, match="has no Python environment"):
        choose(image, [])


def test_an_environment_that_is_the_whole_image(tmp_path: Path, store: Store) -> None:
    made = {"pyvenv.cfg": "version_info = 3.9.1.final.0", "bin/python": "", **installed(".", "a==1")}
    [found] = python_environments(taken(tmp_path, store, files(made), Env=["PATH=/bin"]))
    assert found == PythonEnvironment("/", "3.9.1", ("a==1",), ())


def test_an_image_can_say_anything(tmp_path: Path, store: Store) -> None:
    """Nothing outside of it is read, and what it says forges no line."""
    secret = tmp_path / "secret.dist-info"
    secret.mkdir()
    (secret / "METADATA").write_text("Name: secret\nVersion: 1\n")
    forged = json.dumps({"url": "https://u:pw@h/x\n    - evil==1", "vcs_info": []})
    made = {
        "v/pyvenv.cfg": "version = 3.9.1",
        **installed("v", "good==1"),
        **installed("v", "forged==1", **{"direct_url.json": forged}),
        **installed("v", "broken==1", **{"direct_url.json": "[" * 100_000}),
        f"v/{SITE}/odd-1.dist-info/METADATA": "Name: odd\nVersion: 1;evil\n",
        f"v/{SITE}/name-1.dist-info/METADATA": "Name: --evil\nVersion: 1\n",
        f"v/{SITE}/long-1.dist-info/METADATA": f"Name: long\nVersion: {'1' * 9999}\n",
        f"v/{SITE}/none-1.dist-info/METADATA": "\0\xff",
    }
    links = link(f"v/{SITE}/secret.dist-info", str(secret)) + link(f"v/{SITE}/up.dist-info", "../" * 40 + str(secret))
    loop = link(f"v/{SITE}/loop.dist-info", "loop.dist-info") + link("opt", "../../../" + str(tmp_path))
    image = taken(tmp_path, store, files(made) + links + loop, Env=["VIRTUAL_ENV=/v"])
    [found] = python_environments(image)
    assert found.pins == ("broken==1", "good==1")
    assert [name for name, _ in found.apart] == ["forged", "long", "odd"]
    text = found.to_yaml()
    assert "evil" not in "".join(line for line in text.splitlines() if not line.startswith("#"))
    assert "pw" not in text


def test_links_are_resolved_inside(tmp_path: Path) -> None:
    lower, upper = tmp_path / "lower", tmp_path / "upper"
    (lower / "a/b").mkdir(parents=True)
    (lower / "a/file").write_text("lower")
    (lower / "a/hidden").symlink_to("/etc")
    (upper / "a").mkdir(parents=True)
    (upper / "a/up").symlink_to("../../../../a/file")
    (upper / "root").symlink_to("/a")
    (upper / "out").symlink_to("/etc/passwd")
    os.mkfifo(upper / "pipe")
    os.mknod(upper / "a/hidden", stat.S_IFCHR, 0)
    tree = ImageTree(LowerLayers((upper, lower)))
    assert tree.resolve("/root/up") == ("a", "file")
    assert tree.read("/root/./b/../up") == b"lower"
    assert tree.names("/root") == ["b", "file", "up"]
    assert (tree.has("/out"), tree.resolve("/out"), tree.read("/out")) == (True, None, b"")
    assert (tree.names("/pipe"), tree.read("/pipe"), tree.read("/a")) == ([], b"", b"")
    shutil.rmtree(upper / "a")
    (upper / "a").write_text("a file")
    assert (tree.names("/a"), tree.resolve("/a/file")) == ([], None)
