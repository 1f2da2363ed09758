"""Which images there are: two distributions, six projects, eight releases."""

from __future__ import annotations

from dataclasses import dataclass

_PYTEST = ("pytest==8.2.2", "iniconfig==2.0.0", "packaging==24.1", "pluggy==1.5.0")


@dataclass(frozen=True, slots=True)
class Family:
    """Images over one base.

    Attributes:
        suite: of Debian.
        python: the version of its interpreter.
        prefix: where environments lie.
    """

    suite: str
    python: str
    prefix: str


BOOKWORM = Family("bookworm", "3.11", "/opt/miniconda3/envs/testbed")
TRIXIE = Family("trixie", "3.13", "/opt/testbed")


@dataclass(frozen=True, slots=True)
class Project:
    """A project.

    Attributes:
        name: on the package index.
        family: what its images start from.
        releases: one image for each.
        requirements: of its environment, all of them.
        tests: arguments of pytest.
        odd: whether its images get strange files on top.
        user: who its commands run as.
        workdir: where they start.
    """

    name: str
    family: Family
    releases: tuple[str, ...]
    requirements: tuple[str, ...]
    tests: tuple[str, ...] = ("tests",)
    odd: bool = False
    user: str = "root"
    workdir: str = "/testbed"

    @property
    def images(self) -> list[str]:
        """The names of its images."""
        return [f"{self.name}-{release}" for release in self.releases]


PROJECTS = (
    Project(
        "flask", BOOKWORM, ("3.0.2", "3.0.3"),
        ("werkzeug==3.0.3", "jinja2==3.1.4", "markupsafe==2.1.5", "itsdangerous==2.2.0", "click==8.1.7",
         "blinker==1.8.2", "flit-core==3.9.0", *_PYTEST),
    ),
    Project(
        "networkx", BOOKWORM, ("3.2.1",),
        ("numpy==1.26.4", "scipy==1.13.1", "setuptools==70.1.0", "wheel==0.43.0", *_PYTEST),
        ("networkx/classes", "networkx/utils", "networkx/linalg"),
    ),
    Project(
        "sqlparse", BOOKWORM, ("0.5.3",),
        ("hatchling==1.25.0", "pathspec==0.12.1", "trove-classifiers==2024.7.2", "editables==0.5", *_PYTEST),
        odd=True,
    ),
    Project(
        "click", TRIXIE, ("8.1.7", "8.1.8"), ("setuptools==75.6.0", "wheel==0.45.1", "flit-core==3.10.1", *_PYTEST),
    ),
    Project(
        "marshmallow", TRIXIE, ("3.26.1",), ("simplejson==3.19.3", "flit-core==3.10.1", *_PYTEST), user="nonroot",
    ),
    Project(
        "jinja2", TRIXIE, ("3.1.5",),
        ("markupsafe==3.0.2", "trio==0.28.0", "attrs==24.3.0", "sortedcontainers==2.4.0", "idna==3.10",
         "outcome==1.3.0.post0", "sniffio==1.3.1", "flit-core==3.10.1", *_PYTEST),
        ("/testbed/tests",), odd=True, user="nonroot", workdir="/testbed/src",
    ),
)  # fmt: skip
NAMES = tuple(name for project in PROJECTS for name in project.images)


def project_of(image: str) -> Project:
    """Return the project of an image."""
    return next(project for project in PROJECTS if image in project.images)


def suite_of(image: str) -> str:
    """Return the shell command that runs an image's tests, one line for each outcome."""
    return f"cd /testbed && python -m pytest -rA -q -p no:cacheprovider {' '.join(project_of(image).tests)}"
