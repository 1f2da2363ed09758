# The system's interpreter has no prefix of its own: a virtual environment over it.
/run/minisandbox/uv venv --quiet --seed --no-project --python "$SYSTEM_PYTHON" "$ENVIRONMENT"
settle "$ENVIRONMENT"
compile "$(site_packages)"
