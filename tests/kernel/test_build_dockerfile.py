"""Dockerfiles built in real sandboxes, over a base of one static program."""

from __future__ import annotations

import contextlib
import os
import tarfile
from pathlib import Path

import pytest
from tests.kernel.test_container_images import APPLETS, HOME, base  # noqa: F401 - a fixture
from tests.unit.oci_tools import END, MadeImage, entry

from minisandbox import Sandbox
from minisandbox.cli.main import main
from minisandbox.errors import BuildError, DockerfileError, RegistryError
from minisandbox.images import BuildOptions, Image, export_images, load_image, pull, read_dockerfile
from minisandbox.images.progress import BuildEvent, StepState
from minisandbox.images.runner import build_limits, build_sandbox
from minisandbox.images.schedule import build_all
from minisandbox.store import Store
from minisandbox.types import Network

pytestmark = pytest.mark.kernel

ROOT = os.geteuid() == 0


@pytest.fixture
def store(tmp_path: Path, base: bytes) -> Store:  # noqa: F811 - the fixture
    """A store with an image ``base``."""
    found = Store.open(tmp_path / "store")
    layout = MadeImage([base + END], {"Env": ["PATH=/bin"], "Cmd": ["sh"]}).write_layout(tmp_path / "layout")
    pull(f"oci:{layout}", store=found, name="base")
    return found


@pytest.fixture
def context(tmp_path: Path) -> Path:
    """A context."""
    place = tmp_path / "context"
    (place / "dir").mkdir(parents=True)
    (place / "a.txt").write_text("a\n")
    (place / "dir/run.sh").write_text("#!/bin/sh\necho run\n")
    (place / "dir/run.sh").chmod(0o755)
    return place


def build(text: str, context: Path, store: Store, events: list[BuildEvent] | None = None, **wanted: object) -> Image:
    """Build a Dockerfile."""
    path = context.parent / "Dockerfile"
    path.write_text(text)

    def read() -> object:
        return read_dockerfile(path, context, store=store, options=BuildOptions(**wanted))  # type: ignore[arg-type]

    built = build_all({"made": read}, store=store, progress=None if events is None else events.append)  # type: ignore[dict-item]
    for error in built.failures.values():
        raise error
    return built.images["made"]


def output(image: Image, command: str) -> str:
    """What a command prints in a sandbox of an image."""
    with Sandbox.create(image.spec()) as box:
        return box.exec(["sh", "-c", command]).check().stdout


def test_a_missing_workdir_is_made_for_each_run_and_sandbox(tmp_path: Path, context: Path, store: Store) -> None:
    layout = MadeImage([entry("f") + END], {"WorkingDir": "/no/such"}).write_layout(tmp_path / "other")
    pull(f"oci:{layout}", store=store, name="without")
    image = build(
        """FROM without
COPY --from=base / /
RUN pwd > /seen
RUN cd / && rm -r /no
RUN pwd >> /seen && cd / && rm -r /no
VOLUME /vol/ume
""",
        context,
        store,
    )
    assert output(image, "cat /seen; pwd; ls -d /vol/ume") == "/no/such\n/no/such\n/no/such\n/vol/ume\n"


def test_an_archives_image_is_named_in_from(tmp_path: Path, context: Path, store: Store, base: bytes) -> None:  # noqa: F811
    (tmp_path / "saved.tar").write_bytes(MadeImage([base + END], {"Env": ["A=b"]}).docker_archive("localhost/own:1"))
    taken = pull(f"docker-archive:{tmp_path}/saved.tar", store=store)
    image = build("FROM localhost/own:1\nRUN echo $A > /seen\nCOPY --from=own:1 /etc/passwd /p\n", context, store)
    assert output(image, "cat /seen; wc -l < /p") == "b\n2\n"
    assert load_image(store, "localhost/own:1") == taken, "an image built over it has another name"


def exported(store: Store, tmp_path: Path) -> dict[str, tarfile.TarInfo]:
    """The members of all layers of the built image, as its export has them."""
    export_images(store, ["made"], tmp_path / "exported")
    members: dict[str, tarfile.TarInfo] = {}
    for blob in (tmp_path / "exported/blobs/sha256").iterdir():
        with contextlib.suppress(tarfile.ReadError), tarfile.open(blob) as tar:
            members |= {member.name: member for member in tar}
    return members


def test_instructions_and_their_second_build(context: Path, store: Store) -> None:
    text = """ARG V=1
FROM base AS one
ARG V
ENV GREETING="hello $V"
WORKDIR /work/deep
RUN echo "$GREETING" > out && echo kept > /tmp/kept
COPY --chmod=700 dir/run.sh /bin/
FROM base
COPY --from=one /work/deep/out /tmp/kept /got/
COPY --from=one /bin/run.sh /bin/run
RUN ["/bin/run"]
RUN cat /got/* > /all
ENTRYPOINT ["run"]
"""
    events: list[BuildEvent] = []
    image = build(text, context, store, events, arguments={"V": "2"})
    assert output(image, "cat /all; stat -c %a /bin/run") == "kept\nhello 2\n700\n"
    assert (image.config["Entrypoint"], image.config.get("Cmd"), image.own_root) == (["run"], None, True)
    assert {event.state for event in events} >= {StepState.STARTED, StepState.FINISHED}
    assert (image.notes["base"].startswith("oci:"), "reference" in image.notes) == (True, False)
    again: list[BuildEvent] = []
    assert build(text, context, store, again, arguments={"V": "2"}).key == image.key
    assert all(event.state is StepState.CACHED for event in again)
    (context / "a.txt").touch()
    assert build(text, context, store, arguments={"V": "2"}).key == image.key
    assert build(text, context, store, arguments={"V": "3"}).key != image.key


def test_a_platform_that_the_base_has(context: Path, store: Store) -> None:
    image = build("FROM --platform=$BUILDPLATFORM base:latest\nRUN touch /x\n", context, store)
    assert output(image, "ls /x") == "/x\n"


def test_what_changes_and_what_is_removed(context: Path, store: Store) -> None:
    image = build("FROM base\nRUN rm -r /d && mkdir /d && touch /d/new && rm /private\nCOPY a.txt /d\n", context, store)
    assert output(image, "ls /d; ls /private || true").split() == ["a.txt", "new"]


def test_a_command_that_fails_is_named_with_its_line(context: Path, store: Store) -> None:
    with pytest.raises(BuildError, match=r"line 3' .*echo oops.*exit status 7") as caught:
        build("FROM base\nRUN true\nRUN echo oops; exit 7\nRUN touch /never\n", context, store)
    assert caught.value.log is not None
    assert "oops" in caught.value.log.read_text()
    assert "made" not in store.image_names()
    assert caught.value.exit_code == 24


def test_nothing_runs_where_something_is_wrong(context: Path, store: Store) -> None:
    events: list[BuildEvent] = []
    for line, reason in (
        ("RUN --mount=type=ssh,required x", "ssh"),
        ("COPY none /", "there is no 'none'"),
        ("COPPY", "unknown"),
    ):
        with pytest.raises(DockerfileError, match=f"line 3.*{reason}"):
            build(f"FROM base\nRUN touch /ran\n{line}\n", context, store, events)
    assert not events or all(event.step == "base" for event in events)


def test_mounts_leave_nothing(context: Path, store: Store) -> None:
    text = """FROM base AS other
RUN echo o > /o
FROM base
RUN --mount=type=cache,target=/new/cache --mount=type=tmpfs,target=/t --mount=type=bind,target=/c \\
    --mount=type=bind,from=other,source=/o,target=/o \\
    --mount=type=secret,id=s --mount=type=secret,id=s,env=S,target=/q/s \\
    cat /c/a.txt /o /run/secrets/s /q/s > /out && echo " $S" >> /out && touch /t/x /c/y && echo {} >> /new/cache/f
RUN --mount=type=cache,target=/new/cache cat /new/cache/f >> /out
"""
    image = build(text.format(1), context, store, secrets={"s": b"secret"})
    assert (
        output(image, "cat /out; ls / | grep -x -e new -e t -e c -e o -e q || true") == "a\no\nsecretsecret secret\n1\n"
    )
    again = build(text.format(2), context, store, secrets={"s": b"other"})
    assert output(again, "cat /out").endswith("1\n2\n"), "the cache is kept"
    assert not list(context.glob("y"))


def test_the_size_of_a_tmpfs_holds(context: Path, store: Store) -> None:
    text = """FROM base
RUN --mount=type=tmpfs,target=/t/t,size=1m --mount=type=cache,target=/t/t/c --mount=type=tmpfs,target=/t/u \\
    --mount=type=secret,id=s,target=/t/t/s \\
    for place in /t/t /t/t/c /t/u; do \\
      busybox head -c 2000000 /dev/zero 2> /dev/null > $place/x; echo $(stat -c "%n %s" $place/x); \\
    done > /out; cat /t/t/s >> /out; stat -c %a /t/t >> /out
RUN --mount=type=cache,target=/t/t/c stat -c %s /t/t/c/x >> /out
"""
    image = build(text, context, store, secrets={"s": b"secret\n"})
    expected = ["/t/t/x 1048576", "/t/t/c/x 2000000", "/t/u/x 2000000", "secret", "1777", "2000000"]
    assert output(image, "cat /out; ls -d /t 2> /dev/null || true").splitlines() == expected


def test_a_document_is_a_script(context: Path, store: Store) -> None:
    image = build("FROM base\nRUN <<EOF\n#!/bin/sh -e\necho $0 > /name\nEOF\n", context, store)
    assert output(image, "cat /name") == "/dev/pipes/EOF\n"


def test_networks(context: Path, store: Store) -> None:
    text = "FROM base\nRUN {} cat /proc/net/dev | wc -l > /out\n"
    alone = output(build(text.format("--network=none"), context, store), "cat /out")
    assert int(alone) == 3, "two lines of titles, and the loopback"


def test_a_command_finds_the_environment_that_an_engine_gives(context: Path, store: Store) -> None:
    image = build(
        "FROM base\nENV A=1\nRUN echo $(echo $A $PATH $HOME) > /out; echo $LANG$PAGER >> /out\n", context, store
    )
    assert output(image, "cat /out") == "1 /bin /root\n\n"


def test_users_and_owners(context: Path, store: Store) -> None:
    text = """FROM base
RUN touch /mine && chown app /mine && chown 5:6 /d/kept && chmod 4755 /mine
COPY --chown=app:mail a.txt /old/
USER app
WORKDIR /old/w
RUN id -u > who && echo $HOME >> who
"""
    image = build(text, context, store)
    if not ROOT:  # one id: changes of owners answer success, and do nothing
        assert output(image, "cat who; stat -c %u /mine /d/kept /old/a.txt").split() == [
            "0",
            HOME,
            "0",
            "0",
            "0",
        ]
        assert image.user == ""
        return
    shown = "cat who; stat -c %u:%g /mine /d/kept /old/a.txt /old/w"
    assert output(image, shown).split() == ["1000", HOME, "1000:0", "5:6", "1000:8", "1000:1000"]
    assert image.user == "app"


def test_ids_above_those_of_a_range(tmp_path: Path, context: Path, store: Store) -> None:
    """Root's sandboxes have the ids that engines accept; with one id all files belong to root, as always."""
    text = """FROM base
RUN echo big:x:1000620000:70000::/:/bin/sh >> /etc/passwd && touch /run-made && chown 65536:197609 /run-made
COPY --chown=big a.txt /copied
USER big
WORKDIR /work
RUN echo $(id -u):$(id -g) > who
USER 2147483647:2147483646
WORKDIR last
RUN echo $(id -u):$(id -g) > who
"""
    image = build(text, context, store)
    found = output(image, "cat /work/who /work/last/who; stat -c %u:%g /run-made /copied /work /work/last/who")
    big, last = "1000620000:70000", "2147483647:2147483646"
    expected = [big, last, "65536:197609", big, big, last] if ROOT else ["0:0"] * 6
    assert found.split() == expected
    member = exported(store, tmp_path)["work/last/who"]
    assert f"{member.uid}:{member.gid}" == expected[-1]
    with pytest.raises(DockerfileError, match=r"line 2.*2147483648 is no user or group"):
        build("FROM base\nCOPY --chown=2147483648 a.txt /\n", context, store)


@pytest.mark.parametrize("user", ["nosuch", "nosuch:app", "app:nosuch", "1000:nosuch"])
def test_an_unknown_user_is_an_error_for_everybody(user: str, context: Path, store: Store) -> None:
    with pytest.raises(DockerfileError, match=f"line 3.*USER {user}.*has no 'nosuch'"):
        build(f"FROM base\nUSER {user}\nRUN true\n", context, store)


@pytest.mark.parametrize(
    "line",
    [
        "FROM no.such.invalid/x",
        "COPY --from=no.such.invalid/x / /",
        "RUN --mount=from=no.such.invalid/x,target=/x true",
    ],
)
def test_a_missing_image_is_reported_with_its_line(line: str, context: Path, store: Store) -> None:
    with pytest.raises(RegistryError, match=r"line 3: .*no\.such\.invalid/x"):
        build(f"FROM base\nRUN touch /ran\n{line}\n", context, store)


def test_files_with_several_names_stay_one_file(tmp_path: Path, context: Path, store: Store) -> None:
    text = """FROM base AS one
RUN mkdir -p /s/d && echo x > /s/a && ln /s/a /s/b && ln /s/a /s/d/c
FROM base
COPY --from=one /s /o
RUN --mount=from=one,source=/s,target=/m stat -c "%i %h" /m/a /m/b /m/d/c > /bound
"""
    image = build(text, context, store)
    for command in ("stat -c '%i %h' /o/a /o/b /o/d/c", "cat /bound"):
        rows = output(image, command).splitlines()
        assert len(rows) == 3
        assert {row.split()[1] for row in rows} == {"3"}
        assert len(set(rows)) == 1
    assert output(image, "stat -c %h /bin/sh") == f"{len(APPLETS) + 1}\n", "of a layer that was pulled"
    members = [member for name, member in exported(store, tmp_path).items() if name in ("o/a", "o/b", "o/d/c")]
    assert sorted(member.type for member in members) == [tarfile.REGTYPE, tarfile.LNKTYPE, tarfile.LNKTYPE]


def test_devices_are_not_made(context: Path, store: Store) -> None:
    """With one id making one is pretended; as root it is refused, as in an engine without CAP_MKNOD."""
    image = build("FROM base\nRUN /bin/busybox mknod /dev-x c 1 3; true\n", context, store)
    assert output(image, "ls /dev-x 2> /dev/null || echo none") == "none\n"


def test_owners_are_pretended(tmp_path: Path, store: Store) -> None:
    """What an ordinary user's builds have is asked for here, whoever runs the tests."""
    (tmp_path / "upper").mkdir()
    spec = load_image(store, "base").spec()
    made = "touch /x && chown 5:6 /x && busybox mknod /device c 1 3 && busybox mkfifo /f"
    command = f"{made}; ls /device; stat -c %u:%g /x; ls /f"
    with build_sandbox(spec, build_limits(None), Network.off(), (), tmp_path / "upper", pretend_owners=True) as box:
        done = box.exec(["sh", "-c", command])
    assert done.stdout == "0:0\n/f\n", "neither the owner nor the device; a FIFO is no device"
    assert done.exit_code == 0


def test_a_stage_that_is_gone_is_not_made_again(context: Path, store: Store) -> None:
    """What a finished image no longer needs may be collected."""
    text = "FROM base AS one\nRUN echo 1 > /one\nFROM base\nCOPY --from=one /one /\n"
    image = build(text, context, store)
    events: list[BuildEvent] = []
    (gone,) = [layer for layer in store.layers() if layer.key not in image.layers and layer.step.get("kind") == "run"]
    store.remove_unused_layer(gone.key)
    build(text, context, store, events)
    assert all(event.state is StepState.CACHED for event in events)


def test_the_command(
    context: Path, store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MINISANDBOX_STORE", str(store.root))
    path = context.parent / "Dockerfile"
    run = "RUN --mount=type=secret,id=s cat /run/secrets/s > /out; echo $V >> /out"
    path.write_text(f"FROM base AS a\nARG V\n{run}\nFROM a AS b\nRUN false\n")
    (context.parent / "secret").write_text("sesame\n")
    arguments = ["image", "build", "--file", str(path), str(context), "--name", "mine", "--target", "a"]
    more = ["--build-arg", "V=7", "--secret", f"id=s,src={context.parent}/secret", "--network", "off"]
    assert main([*arguments, *more]) == 0
    assert "mine" in capsys.readouterr().out
    assert output(load_image(store, "mine"), "cat /out") == "sesame\n7\n"
    path.write_text("FROM base\nRUN exit 3\n")
    assert main(["image", "build", "--file", str(path), str(context), "--name", "mine"]) == BuildError.exit_code
    path.write_text("FROM base\nCOPPY a b\n")
    assert main(["image", "build", "--file", str(path), str(context), "--name", "mine"]) == DockerfileError.exit_code
    assert "line 2" in capsys.readouterr().err
