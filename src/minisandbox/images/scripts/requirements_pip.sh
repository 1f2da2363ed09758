"$PYTHON" -m pip install --no-compile -r /tmp/build/requirements.txt
site=$(site_packages)
settle "$ENVIRONMENT"
compile "$site"
freeze
