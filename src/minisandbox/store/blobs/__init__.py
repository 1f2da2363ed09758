"""Layers as blobs: pack, compress, unpack, freeze."""
