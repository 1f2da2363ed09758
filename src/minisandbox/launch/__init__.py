"""The launcher: the only code that touches the kernel.

It imports only the standard library and this package: every import delays the start of the zygote and takes memory in
every sandbox.
"""
