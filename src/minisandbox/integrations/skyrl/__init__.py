"""SkyRL: its trainer, its engines, its clusters; our tasks, sandboxes, agents and gradings.

``trainer.override_entrypoint=minisandbox.integrations.skyrl`` is all that SkyRL has to be told. Nothing of it is
imported before that.
"""

from minisandbox.errors import MissingExtra


def main() -> None:
    """Train, as the command line of SkyRL's own entry point says.

    Raises:
        MissingExtra: SkyRL is not installed.
    """
    try:
        from minisandbox.integrations.skyrl.entry import main as run  # noqa: PLC0415 - loads SkyRL and Ray
    except ImportError as error:
        raise MissingExtra(
            f"minisandbox.integrations.skyrl: {error}",
            reason="SkyRL is not installed in this environment, or is another version than 0.4",
            hint="pip install 'skyrl[fsdp]==0.4.0', with Python 3.12: docs/how-to/train-on-a-cluster.md",
        ) from error

    run()
