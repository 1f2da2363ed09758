"""Compare each image with the engine's own view of it, and its tests with those in a container of the engine."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.images.engine import TIMEOUT, Engine, private_engine, say
from benchmarks.images.projects import project_of, suite_of
from benchmarks.images.sources import Sources, fill_registry, registry, skopeo
from benchmarks.images.suites import Outcomes, outcomes, summary
from benchmarks.images.users import User, at, user_of
from benchmarks.images.views import Comparison, View, compare, list_tree


@dataclass(slots=True)
class Report:
    """What came of it.

    Attributes:
        rows: the lines of the table.
        failures: what is not equal.
        explained: how many paths differ as documented, by mode and field.
    """

    rows: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    explained: dict[tuple[str, str], int] = field(default_factory=dict)


def compare_all(layout: Path, place: Path, modes: Sequence[str], kinds: Sequence[str], names: Sequence[str]) -> Report:
    """Compare images.

    Args:
        layout: an OCI layout of all images.
        place: a new directory for temporary files that every user may enter.
        modes: who takes them in.
        kinds: where they are taken from.
        names: the images.

    Returns:
        The report.
    """
    report = Report()
    shutil.copytree(layout, place / "layout")
    with private_engine(place / "e") as engine, registry(place) as host:
        sources = Sources(place, place / "layout", host, engine)
        fill_registry(host, layout, engine, names)
        views: dict[str, View] = {}
        suites: dict[str, Outcomes] = {}
        for image in names:
            say(f"{image} in podman")
            engine.podman("pull", "--quiet", "--tls-verify=false", sources.at_registry(image))
            with engine.mounted(sources.at_registry(image)) as tree:
                views[image] = list_tree(tree)
            suites[image] = run_in_podman(engine, sources.at_registry(image), image)
        for mode in modes:
            with user_of(mode, place) as user:
                for image in names:
                    suite = suites[image]
                    if not user.keeps_owners and project_of(image).user != "root":  # commands run as root here
                        suite = run_in_podman(engine, sources.at_registry(image), image, "--user", "root")
                    _compare_image(report, user, sources, kinds, image, views[image], suite)
    return report


def run_in_podman(engine: Engine, reference: str, image: str, *options: str) -> Outcomes:
    """Run an image's tests in a container of a copy of it."""
    words = ("run", "--rm", "--network", "none", *options, reference, "sh", "-c", suite_of(image))
    command = engine.podman_words(*words)
    done = subprocess.run(
        command, env=engine.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace", check=False, timeout=TIMEOUT,
    )  # fmt: skip
    found = outcomes(done.stdout)
    if not found:
        raise SystemExit(f"the tests of {image} do not run in podman:\n{done.stdout[-3000:]}")
    return found


def _compare_image(
    report: Report, user: User, sources: Sources, kinds: Sequence[str], image: str, view: View, suite: Outcomes
) -> None:
    say(f"{image} as {user.mode}")
    cells = []
    for kind in kinds:
        one = at(user, f"store-{kind}")
        with sources.reference(kind, image) as reference:
            one.pull(reference, image)
        result = compare_view(one, image, view)
        cells.append("equal" if not result.differences else f"{len(result.differences)} differ")
        report.failures += [f"{image}, {kind}, {user.mode}: {line}" for line in result.differences[:20]]
        for name, count in result.explained.items():
            report.explained[user.mode, name] = report.explained.get((user.mode, name), 0) + count
    status, text = at(user, f"store-{kinds[0]}").run(image, suite_of(image))
    found = outcomes(text)
    if found != suite or not found:
        lines = [
            f"{key}: {suite[key]} in podman, {found[key]} here" for key in {*suite, *found} if suite[key] != found[key]
        ]
        report.failures += [f"{image}, tests, {user.mode}: {line}" for line in (lines or [text[-500:]])[:20]]
        cells.append(f"{summary(found)}, not as in podman (exit status {status})")
    else:
        cells.append(summary(found))
    cells += _compare_returned(report, at(user, f"store-{kinds[0]}"), sources, image, view, suite)
    report.rows.append(f"| {image} | {user.mode} | {len(view):,} | {' | '.join(cells)} |")
    say(report.rows[-1])


def _compare_returned(
    report: Report, user: User, sources: Sources, image: str, view: View, suite: Outcomes
) -> list[str]:
    """Compare what podman makes of an exported archive, and of a pushed image that skopeo copies, with the original."""
    engine, name, cells = sources.engine, f"{user.mode}/{image}", []
    archive = user.store.parent / "exported.tar"
    user.check("image", "export", "--compression", "zstd", image, str(archive))
    loaded = engine.podman("load", "--quiet", "--input", str(archive)).split()[-1]
    archive.unlink()
    user.check("image", "push", image, f"{sources.host}/pushed/{name}")
    copied = f"{sources.host}/copied/{name}"
    skopeo(engine, f"docker://{sources.host}/pushed/{name}", f"docker://{copied}")
    engine.podman("pull", "--quiet", "--tls-verify=false", copied)
    for kind, reference in (("exported", loaded), ("pushed", copied)):
        found = run_in_podman(engine, reference, image)
        with engine.mounted(reference) as tree:
            result = compare(view, list_tree(tree), owners=user.keeps_owners)
        lines = [f"outcome {one}" for one in {*suite, *found} if suite[one] != found[one]] + result.differences
        report.failures += [f"{image}, {kind}, {user.mode}: {line}" for line in lines[:20]]
        cells.append(f"{len(lines)} differ" if lines else "equal")
        engine.podman("rmi", "--force", reference)
    return cells


def compare_view(user: User, image: str, view: View) -> Comparison:
    """Compare the engine's view with what a sandbox sees."""
    with user.sandbox(image) as (root, (uids, gids)):
        ours = list_tree(root, lambda uid, gid: (uids(uid), gids(gid)))
    return compare(view, ours, owners=user.keeps_owners)


def table(report: Report, kinds: Sequence[str]) -> str:
    """Return the report as a table."""
    heads = ("image", "as", "paths", *kinds, "tests, as in podman", "exported, in podman", "pushed, in podman")
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}", *report.rows, ""]
    lines += [f"- as {mode}, {name}: {count} differ as documented" for (mode, name), count in report.explained.items()]
    return "\n".join(lines)
