"""Compare `minisandbox validate` and `minisandbox evaluate` with bare runs of the same test commands."""
