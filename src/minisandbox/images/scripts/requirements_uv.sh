/run/minisandbox/uv pip install --python "$PYTHON" --break-system-packages -r /tmp/build/requirements.txt
site=$(site_packages)
settle "$ENVIRONMENT"
compile "$site"
freeze
