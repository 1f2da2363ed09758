"""Write runs and their rollouts as one HTML file, which loads nothing and runs no script."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from minisandbox.view.index import Filter
from minisandbox.view.pages import STATIC, Links, Pages
from minisandbox.view.site import Run, Site


class FileLinks(Links):
    """Links inside one file: fragments for what the file contains."""

    is_static = True

    @property
    def head(self) -> Markup:
        """The style sheet, and the policy that allows nothing else."""
        style = (STATIC / "style.css").read_text(encoding="utf-8")
        digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
        policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
        tag = Markup('<meta http-equiv="content-security-policy" content="{}">\n').format(policy)
        return tag + Markup("<style>") + Markup(style) + Markup("</style>")  # noqa: S704 - the package's own file

    def runs(self) -> str:
        """The beginning of the file."""
        return "#main"

    def run(self, key: str, query: str = "") -> str:
        """The section of a run; filters need the server."""
        del query
        return f"#{key}"

    def task(self, key: str, instance_id: str) -> str:
        """The first rollout of the task."""
        return self.rollout(key, instance_id, 0)

    def rollout(self, key: str, instance_id: str, attempt: int) -> str:
        """The section of a rollout."""
        return f"#{anchor(key, instance_id, attempt)}top"

    def raw(self, key: str, instance_id: str, attempt: int, part: str) -> str:
        """Nothing: the file has no whole texts."""
        del key, instance_id, attempt, part
        return ""


def anchor(key: str, instance_id: str, attempt: int) -> str:
    """Return what the fragments of a rollout begin with."""
    return f"{key}/{instance_id}/{attempt}/"


def export(site: Site, limit: int) -> str:
    """Return runs as one HTML file.

    Args:
        site: the runs.
        limit: the number of rollouts of each run to contain, in the order of their tasks.
    """
    pages = Pages(site, FileLinks())
    sections = [section for run in site.runs() for section in _sections(pages, run, limit)]
    overview = pages.render("runs_body.html", runs=pages.totals())
    return pages.render("export.html", title="Runs", sections=[Markup(text) for text in [overview, *sections]])  # noqa: S704 - rendered


def _sections(pages: Pages, run: Run, limit: int) -> Sequence[str]:
    rows = run.index.rows(Filter(), limit)
    rollouts = [
        pages.rollout(
            run.key, row.instance_id, row.attempt, "rollout_body.html", anchor(run.key, row.instance_id, row.attempt)
        )
        for row in rows
    ]
    return [pages.run(run.key, Filter(), "run_body.html", limit), *rollouts]


def write_export(site: Site, path: Path, limit: int) -> None:
    """Write :func:`export` to a file.

    Raises:
        OSError: the file cannot be written.
    """
    path.write_text(export(site, limit), encoding="utf-8")
