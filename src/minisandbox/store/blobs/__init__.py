"""Pack layers into compressed blobs, unpack blobs into layers, and freeze unused layers."""
