/run/minisandbox/uv pip install --python "$PYTHON" --break-system-packages -r /tmp/build/requirements.txt
site=$(site_packages)
settle "$ENVIRONMENT"
compile "$site"
/run/minisandbox/uv pip freeze --python "$PYTHON" > /tmp/build/lock
