"""The asynchronous handles: written by hand; ``tools/make_sync.py`` derives the synchronous ones from them."""
