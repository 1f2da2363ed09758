"""The allow-list's way out: one gateway process for each controller, one proxy process for each sandbox that connects.

Standard library only: what is imported here is the start-up time and the memory of every gateway.
"""
