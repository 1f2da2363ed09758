"""Run rollouts and checks on the nodes of a Ray cluster. Ray is imported when a process joins a cluster."""

from minisandbox.rollouts.cluster.driver import Driver, NodeReport
from minisandbox.rollouts.cluster.joining import Cluster
from minisandbox.rollouts.cluster.node import Resources

__all__ = ["Cluster", "Driver", "NodeReport", "Resources"]
