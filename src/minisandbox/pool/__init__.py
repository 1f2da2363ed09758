"""The pool: how many things go on at once."""

from minisandbox.pool.parallel import as_finished

__all__ = ["as_finished"]
