"""Show runs, tasks and rollouts as web pages on this machine, or export them as one HTML file."""

from minisandbox.view.site import Site

__all__ = ["Site"]
