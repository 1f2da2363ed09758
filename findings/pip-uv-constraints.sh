#!/usr/bin/env bash
# pip 25.2, pip 26.3, uv 0.13.8: no variable pins both a package's dependencies and the tools that build it.
#
# Expected: with PIP_CONSTRAINT in the environment, an installation takes the pinned versions, also in the isolated
#           environment in which a source package is built.
# Observed: pip 25.2 does so. pip 26.3 pins the dependencies alone; the build takes the newest tools. uv ignores
#           PIP_CONSTRAINT. Its own UV_CONSTRAINT pins no build tools either. No warning is printed in any of these cases.
# Why it matters: images of old commits pin setuptools or Cython this way. A new pip, or an agent that calls `uv pip`, builds
#           the project with today's tools. Set PIP_CONSTRAINT, PIP_BUILD_CONSTRAINT, UV_CONSTRAINT and UV_BUILD_CONSTRAINT.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
for version in 25.2 26.3; do
    "${PYTHON:-python3}" -m venv "pip-$version"
    "pip-$version/bin/pip" install -q "pip==$version"
done
"${PYTHON:-python3}" -m venv uv-0.13.8
uv-0.13.8/bin/pip install -q 'uv==0.13.8'

mkdir wheels project
cat >project/backend.py <<'END'
"""A build backend that records the version of its build tool; also writes the two wheels of this script."""

import zipfile


def write_wheel(folder, name, version, source, requires=""):
    path = f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": source,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: backend\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(f"{folder}/{path}", "w") as wheel:
        for file, content in files.items():
            wheel.writestr(file, content)
    return path


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    import buildtool

    return write_wheel(wheel_directory, "project", "1.0", f"tool = {buildtool.version!r}\n", "Requires-Dist: dependency\n")
END
cat >project/pyproject.toml <<'END'
[build-system]
requires = ["buildtool"]
build-backend = "backend"
backend-path = ["."]
END
(cd project && "${PYTHON:-python3}" -B -c '
from backend import write_wheel

for name in "dependency", "buildtool":
    for version in "1.0", "2.0":
        write_wheel("../wheels", name, version, f"version = {version!r}\n")
')
printf 'dependency==1.0\nbuildtool==1.0\n' >constraints.txt

# Install the project with one variable set, and print the versions of its dependency and of its build tool.
try() {
    local installer=$1 variable=$2
    shift 2
    env -i PATH="$PATH" HOME="$work" PIP_CONFIG_FILE=/dev/null PIP_DISABLE_PIP_VERSION_CHECK=1 "$variable=$work/constraints.txt" \
        "$@" --no-index --find-links wheels ./project >log 2>&1 || { cat log >&2; exit 1; }
    printf '%s, %s: ' "$installer" "$variable"
    "$installer/bin/python" -c 'import dependency, project; print("dependency", dependency.version, "built with", project.tool)'
}
{
    for version in 25.2 26.3; do
        try "pip-$version" PIP_CONSTRAINT "pip-$version/bin/pip" install -q --no-cache-dir --force-reinstall
    done
    try pip-26.3 PIP_BUILD_CONSTRAINT pip-26.3/bin/pip install -q --no-cache-dir --force-reinstall
    for variable in PIP_CONSTRAINT UV_CONSTRAINT UV_BUILD_CONSTRAINT; do
        try uv-0.13.8 "$variable" uv-0.13.8/bin/uv pip install -q --no-config --no-cache --reinstall --python uv-0.13.8/bin/python
    done
} >observed
cat observed
diff - observed <<'END' || { echo "the reach of constraints in pip or uv has changed" >&2; exit 1; }
pip-25.2, PIP_CONSTRAINT: dependency 1.0 built with 1.0
pip-26.3, PIP_CONSTRAINT: dependency 1.0 built with 2.0
pip-26.3, PIP_BUILD_CONSTRAINT: dependency 2.0 built with 1.0
uv-0.13.8, PIP_CONSTRAINT: dependency 2.0 built with 2.0
uv-0.13.8, UV_CONSTRAINT: dependency 1.0 built with 2.0
uv-0.13.8, UV_BUILD_CONSTRAINT: dependency 2.0 built with 1.0
END
