"""SkyRL: its trainer, its engines, its clusters; our tasks, sandboxes, agents and gradings.

``trainer.override_entrypoint=minisandbox.integrations.skyrl`` is all that SkyRL has to be told. Nothing of it is
imported before that.
"""


def main() -> None:
    """Train, as the command line of SkyRL's own entry point says."""
    from minisandbox.integrations.skyrl.entry import main as run  # noqa: PLC0415 - loads SkyRL and Ray

    run()
