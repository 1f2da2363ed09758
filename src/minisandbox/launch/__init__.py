"""The launcher: the processes that isolate and run sandboxes, and the only code that makes system calls for it.

It imports only the standard library and this package, because every import delays the start of the zygote and takes
memory in every sandbox.
"""
