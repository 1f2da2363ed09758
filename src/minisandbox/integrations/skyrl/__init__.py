"""Train with SkyRL's trainer, engines and clusters on this package's tasks, sandboxes, agents and grading.

Run SkyRL with ``trainer.override_entrypoint=minisandbox.integrations.skyrl``. This package imports SkyRL only when
:func:`main` is called.
"""

from minisandbox.errors import MissingExtra


def main() -> None:
    """Train with the arguments of SkyRL's own entry point.

    Raises:
        MissingExtra: SkyRL is not installed.
    """
    try:
        from minisandbox.integrations.skyrl.entry import main as run  # noqa: PLC0415 - imports SkyRL and Ray
    except ImportError as error:
        raise MissingExtra(
            f"minisandbox.integrations.skyrl: {error}",
            reason="SkyRL is not installed in this environment, or its version is not 0.4",
            hint="pip install 'skyrl[fsdp]==0.4.0' on Python 3.12; see docs/how-to/train-on-a-cluster.md",
        ) from error

    run()
