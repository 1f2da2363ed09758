"""The launcher: the only code that touches the kernel.

Standard library only, and nothing of ours from outside this package: what is imported here is the start-up time of
the zygote and lives in the memory of every sandbox.
"""
