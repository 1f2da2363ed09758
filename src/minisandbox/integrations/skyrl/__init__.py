"""SkyRL's trainer, engines and clusters with our tasks, sandboxes, agents and grading.

SkyRL only needs ``trainer.override_entrypoint=minisandbox.integrations.skyrl``. Nothing of SkyRL is imported before
that takes effect.
"""

from minisandbox.errors import MissingExtra


def main() -> None:
    """Train with the command line of SkyRL's own entry point.

    Raises:
        MissingExtra: SkyRL is not installed.
    """
    try:
        from minisandbox.integrations.skyrl.entry import main as run  # noqa: PLC0415 - loads SkyRL and Ray
    except ImportError as error:
        raise MissingExtra(
            f"minisandbox.integrations.skyrl: {error}",
            reason="SkyRL is not installed in this environment, or its version is not 0.4",
            hint="pip install 'skyrl[fsdp]==0.4.0' on Python 3.12; see docs/how-to/train-on-a-cluster.md",
        ) from error

    run()
