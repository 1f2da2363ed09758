"""Layers as blobs: their tar written and unpacked, compressed, kept cold."""
