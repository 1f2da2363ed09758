"""``minisandbox tasks``: one module per group of verbs."""
