"""Attacks from inside a sandbox, as a program of its own: ``python3 -m probes CANARIES`` (Python >= 3.8, nothing else).

Each probe tries one thing that no sandbox should allow and says whether it could. It is harmless with no sandbox at
all: what is written is what was there before, signals are signal 0, dangerous calls get arguments that cannot work,
mounts are made in a mount namespace of the probe's own. What would still do harm is not tried without a sandbox, and
says why.
"""
