"""The synchronous handles: generated from ``_async`` by ``tools/make_sync.py``."""
