# What is installed, with versions; those of what came from a directory too.
freeze() {
    "$PYTHON" -m pip list --format=freeze > /tmp/build/lock
}
