"""The pool: how many things go on at once."""

from minisandbox.pool.parallel import as_finished
from minisandbox.pool.threads import Threads
from minisandbox.pool.warm import WarmPool

__all__ = ["Threads", "WarmPool", "as_finished"]
