"""Network access by allow-list: one gateway process per controller, one proxy process per connected sandbox.

It imports only the standard library and the launcher, because every import delays the start of the gateway and takes
memory in it.
"""
