"""Container images of real projects, built by buildah; compared with podman, and measured with it."""
