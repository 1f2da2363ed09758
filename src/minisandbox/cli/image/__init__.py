"""``minisandbox image``: one module per group of verbs."""
