/run/minisandbox/uv pip install --python "$PYTHON" --break-system-packages $COMPLETE -r /tmp/build/requirements.txt
[ ! -s /tmp/build/overrides.txt ] || /run/minisandbox/uv pip install --python "$PYTHON" --break-system-packages -r /tmp/build/overrides.txt
site=$(site_packages)
settle "$ENVIRONMENT"
compile "$site"
freeze
