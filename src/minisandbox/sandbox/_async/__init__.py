"""The asynchronous handles. They are written by hand; ``tools/make_sync.py`` derives the synchronous handles."""
