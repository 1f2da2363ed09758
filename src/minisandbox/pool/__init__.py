"""How much work is done at once: threads, and sandboxes made ahead."""

from minisandbox.pool.threads import Threads, as_finished
from minisandbox.pool.warm import WarmPool

__all__ = ["Threads", "WarmPool", "as_finished"]
