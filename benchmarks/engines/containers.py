"""What podman and docker have in common: their command lines."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.engines.engine import ENVIRONMENT, WORKDIR, Engine, NotRun, Output, Project, run_program


class Containers(Engine):
    """Containers that sleep, over an image that is imported from an archive; no network, no limits.

    Attributes:
        command: the client, with the options that all its calls take.
        environment: the client's environment.
        removal: the command that removes a container at once.
    """

    needs_root = True
    private = True
    command: Sequence[str]
    environment: dict[str, str]
    removal: Sequence[str] = ("rm", "--force")

    def call(self, *words: str) -> str:
        """Run the client and return the last word that it printed.

        Raises:
            NotRun: it failed.
        """
        output = run_program([*self.command, *words], self.environment)
        if output.status != 0:
            raise NotRun(f"{self.command[0]} {words[0]}: {output.text[-500:]}")
        return output.text.split()[-1]

    def import_images(self) -> None:
        """Make an image of every project."""
        for project in self.projects:
            self.call("import", str(project.image), f"localhost/{project.home.name}:latest")

    def create(self, project: Project) -> str:
        """Start a container and return its id."""
        variables = [word for pair in ENVIRONMENT.items() for word in ("--env", "=".join(pair))]
        return self.call(
            "run", "--detach", "--network", "none", "--cgroup-parent", f"/{self.group}/containers", *variables,
            "--workdir", WORKDIR, f"localhost/{project.home.name}:latest", "sleep", "infinity",
        )  # fmt: skip

    def exec(self, box: str, command: Sequence[str]) -> Output:
        """Run a program in the container."""
        return run_program([*self.command, "exec", box, *command], self.environment)

    def stop(self, box: str) -> None:
        """Kill and remove the container."""
        self.call(*self.removal, box)
