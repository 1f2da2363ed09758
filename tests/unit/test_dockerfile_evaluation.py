"""Dockerfiles: what is parsed, what instructions leave behind, and what is refused with its line."""

from __future__ import annotations

import pytest
from tests.unit.dockerfile_tools import copies, runs, stage

from minisandbox.errors import DockerfileError
from minisandbox.images.dockerfile import evaluation
from minisandbox.images.dockerfile.parsing import parse_dockerfile
from minisandbox.spec import OciBase, ScratchBase, StageBase
from minisandbox.types import Network


def one_run(text: str, **wanted: object) -> tuple[str, ...]:
    (run,) = runs(stage(text, **wanted))  # type: ignore[arg-type]
    return run.argv


def variables(text: str, **wanted: object) -> dict[str, str]:
    return dict(runs(stage(f"FROM base\n{text}\nRUN true", **wanted))[-1].variables)  # type: ignore[arg-type]


# --- syntax -----------------------------------------------------------------------------------------------------------


def test_directives_comments_and_continuation_lines() -> None:
    text = "# syntax=docker/dockerfile:1.7\n# escape=`\n# check=skip=all\nFROM base\nRUN a `\n  # a comment\n\n  && b\n"
    parsed = parse_dockerfile(text)
    assert parsed.escape == "`"
    assert [(one.name, one.line) for one in parsed.instructions] == [("FROM", 4), ("RUN", 5)]
    assert one_run(text) == ("/bin/sh", "-c", "a   && b")


def test_lower_case_and_json_forms() -> None:
    assert one_run('from base\nrun ["a", "b c"]') == ("a", "b c")
    assert one_run("FROM base\nRUN [ -f /x ] && y") == ("/bin/sh", "-c", "[ -f /x ] && y")


@pytest.mark.parametrize(
    ("body", "argv"),
    [
        ("RUN <<EOF\na\n$b\nEOF", ("/bin/sh", "-c", "a\n$b\n")),
        ("RUN <<-EOF\n\ta\n\tEOF", ("/bin/sh", "-c", "a\n")),
        ("RUN cat <<'EOF' > /x\na\nEOF", ("/bin/sh", "-c", "cat <<'EOF' > /x\na\nEOF")),
        ("RUN <<A cat && <<B cat\n1\nA\n2\nB", ("/bin/sh", "-c", "<<A cat && <<B cat\n1\nA\n2\nB")),
        ("RUN <<EOF\n#!/usr/bin/env python3\nprint(1)\nEOF", ("/dev/pipes/EOF",)),
        ('SHELL ["/bin/bash", "-euc"]\nRUN <<EOF\na\nEOF', ("/bin/bash", "-euc", "a\n")),
    ],
)
def test_documents_of_run(body: str, argv: tuple[str, ...]) -> None:
    assert one_run(f"FROM base\n{body}") == argv


def test_a_document_that_is_a_script_is_kept() -> None:
    (run,) = runs(stage("FROM base\nRUN <<EOF\n#!/bin/cat\nx\nEOF"))
    assert run.script is not None
    assert (run.script.name, run.script.content) == ("EOF", b"#!/bin/cat\nx\n")


def test_documents_of_copy_expand_variables_unless_quoted() -> None:
    text = "FROM base\nENV A=1\nCOPY <<x <<'y' /d/\n$A \"q\"\nx\n$A\ny\n"
    (copy,) = copies(stage(text))
    assert [(one.name, one.content) for one in copy.documents] == [("x", b'1 "q"\n'), ("y", b"$A\n")]
    assert (copy.sources, copy.destination) == ((), "/d/")


# --- variables --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("$A", "1.2.3"), ("${A}x", "1.2.3x"), ("${B:-d}", "d"), ("${E:-d}", "d"), ("${E-d}", ""), ("${A:+y}", "y"),
        ("${B:+y}", ""), ("${B+y}", ""), ("${A#1.}", "2.3"), ("${A##*.}", "3"), ("${A%.*}", "1.2"), ("${A%%.*}", "1"),
        ("${A/./-}", "1-2.3"), ("${A//./-}", "1-2-3"), (r"\$A", "$A"), ("'$A'", "$A"), ('"$A b"', "1.2.3 b"),
        ("$B", ""), ("${B:-${A}}", "1.2.3"),
    ],
)  # fmt: skip
def test_expansion(word: str, value: str) -> None:
    assert variables(f"ENV A=1.2.3 E=\nENV X={word}")["X"] == value


def test_a_required_variable() -> None:
    with pytest.raises(DockerfileError, match=r"line 2.*needed"):
        stage("FROM base\nENV X=${A:?needed}")


def test_one_env_does_not_see_itself() -> None:
    found = variables("ENV a=hello\nENV a=bye b=$a\nENV c=$a")
    assert (found["a"], found["b"], found["c"]) == ("bye", "hello", "bye")


def test_env_of_the_old_form_and_of_the_base() -> None:
    found = variables("ENV a one two\nENV PATH=/opt/bin:$PATH")
    assert (found["a"], found["PATH"], found["LANG"]) == ("one two", "/opt/bin:/usr/bin", "C")


def test_arguments_have_scopes() -> None:
    text = "ARG V=1\nFROM base:$V AS a\nARG V\nARG W=w$V\nRUN a\nFROM a\nRUN b"
    found = stage(text, arguments={"V": "2"})
    assert isinstance(found.base, StageBase)
    assert found.base.recipe.base == OciBase("base:2")
    seen = dict(runs(found.base.recipe)[0].variables)
    assert (seen["V"], seen["W"]) == ("2", "w2")
    assert "V" not in dict(runs(found)[0].variables)  # a stage does not inherit arguments
    assert all(not row.startswith(("V=", "W=")) for row in found.config["Env"])  # type: ignore[union-attr]


def test_an_argument_counts_from_its_line_on_and_env_wins() -> None:
    found = variables("ENV A=env\nARG A=arg\nARG B=$A", arguments={"A": "given"})
    assert (found["A"], found["B"]) == ("env", "env")
    first, second = runs(stage("FROM base\nRUN a\nARG A=1\nRUN b"))
    assert "A" not in dict(first.variables)
    assert dict(second.variables)["A"] == "1"


def test_platform_arguments_and_proxies() -> None:
    text = "FROM --platform=$BUILDPLATFORM base\nARG TARGETARCH\nRUN a"
    (run,) = runs(stage(text, platform="linux/arm64", arguments={"http_proxy": "http://p"}))
    assert dict(run.variables)["TARGETARCH"] == "arm64"
    assert run.unkeyed == (("http_proxy", "http://p"),)
    assert "http_proxy" not in dict(run.variables)


# --- configuration ----------------------------------------------------------------------------------------------------


def test_what_the_image_says_of_itself() -> None:
    text = """FROM base
LABEL a="b c" d=e
LABEL f g h
EXPOSE 80 53/udp 8000-8001
VOLUME /a /b
VOLUME ["/c d"]
STOPSIGNAL SIGINT
USER me:us
WORKDIR x
WORKDIR ../y
MAINTAINER somebody
SHELL ["/bin/bash", "-c"]
HEALTHCHECK --interval=1m30s --timeout=3s --retries=2 CMD curl -f http://localhost || exit 1
CMD run it
"""
    config = stage(text).config
    assert config["Labels"] == {"a": "b c", "d": "e", "f": "g h"}
    assert list(config["ExposedPorts"]) == ["80/tcp", "53/udp", "8000/tcp", "8001/tcp"]  # type: ignore[arg-type]
    assert list(config["Volumes"]) == ["/a", "/b", "/c d"]  # type: ignore[arg-type]
    assert (config["StopSignal"], config["User"], config["WorkingDir"]) == ("SIGINT", "me:us", "/srv/y")
    assert config["Cmd"] == ["/bin/bash", "-c", "run it"]
    assert config["Healthcheck"] == {
        "Test": ["CMD-SHELL", "curl -f http://localhost || exit 1"], "Interval": 90 * 10**9, "Timeout": 3 * 10**9,
        "Retries": 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("body", "command"),
    [
        ("", ["bash"]),
        ('ENTRYPOINT ["x"]', None),
        ('CMD ["mine"]\nENTRYPOINT ["x"]', ["mine"]),
        ('ENTRYPOINT ["x"]\nCMD ["mine"]', ["mine"]),
    ],
)
def test_entrypoint_drops_the_command_of_the_base(body: str, command: list[str] | None) -> None:
    assert stage(f"FROM base\n{body}").config.get("Cmd") == command


def test_triggers_of_the_base_run_first_and_are_gone() -> None:
    found = stage("FROM base\nRUN mine", {"OnBuild": ["ENV A=1", "RUN theirs $A"]})
    assert [run.argv[-1] for run in runs(found)] == ["theirs $A", "mine"]
    assert found.config["OnBuild"] is None
    assert stage("FROM base\nONBUILD RUN later").config["OnBuild"] == ["RUN later"]
    assert runs(stage("FROM base AS a\nONBUILD RUN later\nFROM a"))[0].argv[-1] == "later"


# --- stages -----------------------------------------------------------------------------------------------------------


def test_stages_by_name_number_and_image() -> None:
    text = "FROM x AS Build\nRUN a\nFROM scratch\nCOPY --from=build /a /\nCOPY --from=0 /b /\nCOPY --from=img:1 /c /"
    found = stage(text)
    assert isinstance(found.base, ScratchBase)
    first, second, third = (copy.origin for copy in copies(found))
    assert first is second
    assert isinstance(first, StageBase)
    assert third == OciBase("img:1")


def test_stages_that_are_not_needed_are_skipped() -> None:
    text = "FROM x AS a\nRUN --security=insecure b\nFROM y AS c\nRUN d\nFROM z AS e\nCOPY --from=nowhere/x / /"
    assert runs(stage(text, target="c"))[0].argv[-1] == "d"
    assert stage(text, target="1") == stage(text, target="c")
    with pytest.raises(DockerfileError, match="no stage 'f'"):
        stage(text, target="f")


# --- mounts -----------------------------------------------------------------------------------------------------------


def test_mounts() -> None:
    text = (
        "FROM x AS a\nFROM base\nARG T=/t\n"
        "RUN --mount=type=cache,target=/c,id=k --mount=type=secret,id=s --mount=type=secret,id=e,env=E,required"
        " --mount=from=a,source=/b,target=$T --mount=type=tmpfs,target=u --network=none true"
    )
    (run,) = runs(stage(text))
    shown = [(one.wanted.kind, one.wanted.target, one.wanted.identity) for one in run.mounts]
    assert shown == [
        ("cache", "/c", "k"), ("secret", "/run/secrets/s", "s"), ("secret", "", "e"), ("bind", "/t", "/t"),
        ("tmpfs", "/srv/u", "/srv/u"),
    ]  # fmt: skip
    assert run.mounts[2].wanted.required
    assert isinstance(run.mounts[3].origin, StageBase)
    assert run.network == Network.off()


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096), ("1b", 1), ("64k", 64 << 10), ("1M", 1 << 20), ("1mb", 1 << 20), ("1.5 GiB", 3 << 29),
        ("1t", 1 << 40), (".5p", 1 << 49), ("0", 0), ("7.9", 7),
        ("", None), ("m", None), ("-1", None), ("1e", None), ("1mib ", None), ("1bb", None), ("9999p", None),
    ],
)  # fmt: skip
def test_sizes(text: str, size: int | None) -> None:
    line = f"FROM base\nRUN --mount=type=tmpfs,target=/t,size='{text}' x\n"
    if size is None:
        with pytest.raises(DockerfileError, match=r"line 2.*is not a size.*64m"):
            stage(line)
    else:
        assert runs(stage(line))[0].mounts[0].wanted.size == size


def test_an_ssh_mount_that_is_not_required_mounts_nothing() -> None:
    # as BuildKit without an agent; SWE-smith's Dockerfiles have one in each RUN
    text = "FROM base\nRUN --mount=type=ssh,required=false a\nRUN --mount=type=ssh a\nRUN a"
    assert [run.mounts for run in runs(stage(text))] == [(), (), ()]


# --- what is refused --------------------------------------------------------------------------------------------------

BAD = {
    "empty": ("", "no instruction"),
    "no FROM": ("RUN a", "line 1.*only ARG"),
    "only ARG": ("ARG A", "no FROM"),
    "unknown instruction": ("FROM x\nCOPPY a b", "line 2.*unknown instruction"),
    "unknown flag": ("FROM x\nCOPY --form=a b c", "line 2.*no flag --form"),
    "flag of another": ("FROM x\nUSER --chown=a b", "line 2.*no flag --chown"),
    "twice": ("FROM x\nCOPY --from=a --from=b c d", "line 2.*more than once"),
    "one argument": ("FROM x\nCOPY a", "line 2.*at least one source"),
    "FROM AS": ("FROM x AS", "line 1.*FROM has"),
    "FROM AS name": ("FROM x AS 1a", "line 1.*cannot name a stage"),
    "empty FROM": ("ARG A\nFROM $A", "line 2.*is empty"),
    "unterminated document": ("FROM x\nRUN <<EOF\na", "line 2.*unterminated"),
    "ENV without value": ("FROM x\nENV A", "line 2.*two arguments"),
    "bad substitution": ("FROM x\nENV A=${B", "line 2.*missing '}'"),
    "SHELL": ("FROM x\nSHELL bash", "line 2.*JSON"),
    "EXPOSE": ("FROM x\nEXPOSE http", "line 2.*no port"),
    "HEALTHCHECK": ("FROM x\nHEALTHCHECK --interval=5 CMD a", "line 2.*30s"),
    "ONBUILD ONBUILD": ("FROM x\nONBUILD ONBUILD RUN a", "line 2.*cannot have ONBUILD"),
    "ONBUILD many times": (f"FROM x\n{'ONBUILD ' * 3000}RUN a", "line 2.*cannot have ONBUILD"),
    "JSON of many levels": (f"FROM x\nRUN {'[' * 100_000}", "too many levels"),
    "other digits of EXPOSE": ("FROM x\nEXPOSE \u00b2", "line 2.*is no port"),
    "many digits of EXPOSE": (f"FROM x\nEXPOSE {'9' * 5000}", "line 2.*is no port"),
    "other digits of a flag": ("FROM x\nHEALTHCHECK --retries=\u00b2 CMD a", "line 2.*give a number"),
    "an endless interval": (f"FROM x\nHEALTHCHECK --interval={'9' * 400}h CMD a", "line 2.*292 years"),
    "a NUL character": ("FROM x\nUSER a\0", "line 2.*NUL"),
    "a NUL character in JSON": ('FROM x\nRUN ["a\\u0000"]', "line 2.*NUL"),
    "a variable named by a variable": ("FROM x\nENV A=b=c\nENV $A=d", "line 3.*cannot be an environment variable"),
    "stages on stages": ("FROM x AS s0\n" + "".join(f"FROM s{n} AS s{n + 1}\n" for n in range(2000)), "100 stages"),
    "ONBUILD unknown": ("FROM x\nONBUILD COPPY a", "line 2.*unknown"),
    "security": ("FROM x\nRUN --security=insecure a", "line 2.*not supported"),
    "ssh": ("FROM x\nRUN --mount=type=ssh,required=true a", "line 2.*no build has an SSH agent"),
    "mount type": ("FROM x\nRUN --mount=type=disk,target=/a a", "line 2.*disk is not supported"),
    "mount field": ("FROM x\nRUN --mount=type=cache,target=/a,colour=b a", "line 2.*no colour"),
    "mount at root": ("FROM x\nRUN --mount=type=tmpfs,target=/ a", "line 2.*mounted at /"),
    "ADD from the network": ("FROM x\nADD https://example.org/a /b", "line 2.*not supported"),
    "ADD from git": ("FROM x\nADD git@example.org:a.git /b", "line 2.*not supported"),
    "stage of later": ("FROM x AS b\nCOPY --from=b c d", "line 2.*comes later"),
    "stage number": ("FROM x\nCOPY --from=3 c d", "line 2.*no such stage"),
    "escape": ("# escape=x\nFROM y", "line 1.*escape"),
    "frontend": ("# syntax=example.org/mine\nFROM y", "line 1.*program of its own"),
    "only strings": ('FROM x\nCMD ["a", 1]', "line 2.*strings"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_refused_with_the_line(case: str) -> None:
    text, reason = BAD[case]
    with pytest.raises(DockerfileError, match=f"(?s){reason}"):
        stage(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("ENV A=xxxxxxxx\n" + "ENV A=$A$A\n" * 60, "line 1[0-9].*more than 65536"),
        (f"ENV A={'x' * 1000}\n" + "LABEL a=$A\n" * 100, "more than 65536"),
        (f"ENV A={'x' * 1000}\nENV B=${{A//x/$A}}", "line 3.*more than 65536"),
        (f"ENV A={'a' * 999}\nENV B=${{A#*a*a*a*a*b}}", "line 3.*too long to match"),
        (f"ENV P=*a*a*a*a*b A={'a' * 200}\nENV B=${{A#$P}}", "line 3.*too long to match"),
    ],
)
def test_expansion_is_bounded(text: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "_MOST_EXPANDED", 1 << 16)
    with pytest.raises(DockerfileError, match=reason):
        stage(f"FROM x\n{text}")
