# What is installed, with versions; those of what came from a directory too.
freeze() {
    /run/minisandbox/uv pip list --format=freeze --python "$PYTHON" > /tmp/build/lock
}
