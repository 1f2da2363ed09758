"""Network access by allow-list: one gateway process per controller, one proxy process per connected sandbox.

Standard library only: what is imported here is the start-up time and the memory of every gateway.
"""
