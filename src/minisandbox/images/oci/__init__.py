"""Container images: from registries, OCI layouts and archives into the store, without a container engine."""
