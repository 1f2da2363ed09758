"""The protocol between controller and workers, sans-I/O: requests, and validation of the answers."""
