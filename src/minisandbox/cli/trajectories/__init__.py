"""``minisandbox trajectories``: one module per group of verbs."""
