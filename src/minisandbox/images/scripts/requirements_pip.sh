# Installers first: an old pip does not know the wheels that the others come as.
grep -iE '^(pip|setuptools|wheel)[<=>~!]' /tmp/build/requirements.txt > /tmp/build/installers.txt || true
[ ! -s /tmp/build/installers.txt ] || "$PYTHON" -m pip install --no-compile --upgrade -r /tmp/build/installers.txt
"$PYTHON" -m pip install --no-compile $COMPLETE -r /tmp/build/requirements.txt
[ ! -s /tmp/build/overrides.txt ] || "$PYTHON" -m pip install --no-compile -r /tmp/build/overrides.txt
site=$(site_packages)
settle "$ENVIRONMENT"
compile "$site"
freeze
