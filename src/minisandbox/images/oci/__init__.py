"""Pull, import, export and push container images without a container engine: registries, OCI layouts, archives."""
