"""The controller's side of the worker protocol, without I/O: build requests and validate answers."""
