"$PYTHON" -m pip install --no-compile $COMPLETE -r /tmp/build/requirements.txt
[ ! -s /tmp/build/overrides.txt ] || "$PYTHON" -m pip install --no-compile -r /tmp/build/overrides.txt
site=$(site_packages)
settle "$ENVIRONMENT"
compile "$site"
freeze
