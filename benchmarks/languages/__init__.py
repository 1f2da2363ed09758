"""Tasks in Go, JavaScript, Java, PHP, Ruby and C from Debian's sources: validated here, and the same in podman."""
