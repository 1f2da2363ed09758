#!/usr/bin/env bash
# buildah 1.28.2 (Debian 12): a build from an image without a history succeeds, and a build from its result fails.
#
# Expected: the history is optional in an image's configuration (OCI image specification), so builds do not depend on it.
# Observed: the first build writes a history with its own entry alone, fewer entries than layers. A build from that image then
#           fails: "history lists 2 non-empty layers, but we have 4 layers on disk".
# Why it matters: tools that assemble task images need no history to be accepted, pulled and built on once. The failure
#           comes with a user's second Dockerfile. Write one entry per layer.
set -euo pipefail
command -v buildah >/dev/null || { echo "skipped: buildah is not installed"; exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
echo "$(buildah --version | cut -d ' ' -f 1-3), recorded with 1.28.2"

cat >write_image.py <<'END'
import hashlib
import io
import json
import pathlib
import sys
import tarfile

image = pathlib.Path(sys.argv[1])
blobs = image / "blobs" / "sha256"
blobs.mkdir(parents=True)


def write_blob(content, kind):
    digest = hashlib.sha256(content).hexdigest()
    (blobs / digest).write_bytes(content)
    return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{digest}", "size": len(content)}


layers = []
for name in "one", "two":
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo(name))
    layers.append(write_blob(layer.getvalue(), "layer.v1.tar"))
configuration = {
    "architecture": "amd64",
    "os": "linux",
    "rootfs": {"type": "layers", "diff_ids": [layer["digest"] for layer in layers]},
}
if sys.argv[2:] == ["history"]:
    configuration["history"] = [{"created_by": name} for name in ("one", "two")]
config = write_blob(json.dumps(configuration).encode(), "config.v1+json")
manifest = write_blob(json.dumps({"schemaVersion": 2, "config": config, "layers": layers}).encode(), "manifest.v1+json")
manifest["annotations"] = {"org.opencontainers.image.ref.name": "latest"}
(image / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [manifest]}))
(image / "oci-layout").write_text(json.dumps({"imageLayoutVersion": "1.0.0"}))
END
"${PYTHON:-python3}" write_image.py without
"${PYTHON:-python3}" write_image.py with history
storage=(--root "$work/storage" --runroot "$work/run" --storage-driver vfs)
buildah "${storage[@]}" images >log 2>&1 || { echo "skipped: buildah cannot run here: $(tail -n 1 log)"; exit 77; }

mkdir context
build() {
    local status=0
    printf 'FROM %s\nCOPY file /%s\n' "$1" "$2" >Dockerfile
    echo "$2" >context/file
    buildah "${storage[@]}" bud --arch amd64 --pull-never -f Dockerfile -t "$2" context >log 2>&1 || status=$?
    echo "  FROM $1: status $status$(grep -oE ', history lists|history lists.*' log | sed 's/^/, /')"
    [ "$status" != 0 ] || buildah "${storage[@]}" inspect --type image "$2" | "${PYTHON:-python3}" -c '
import json, sys

image = json.load(sys.stdin)["OCIv1"]
print("    layers:", len(image["rootfs"]["diff_ids"]), "entries of the history:", len(image["history"]))'
}
for history in with without; do
    echo "an image of two layers $history history"
    build "oci:$history:latest" "first-$history"
    build "localhost/first-$history" "second-$history"
done >observed
cat observed
diff - observed <<'END' || { echo "buildah's treatment of images without a history has changed" >&2; exit 1; }
an image of two layers with history
  FROM oci:with:latest: status 0
    layers: 3 entries of the history: 3
  FROM localhost/first-with: status 0
    layers: 4 entries of the history: 4
an image of two layers without history
  FROM oci:without:latest: status 0
    layers: 3 entries of the history: 1
  FROM localhost/first-without: status 125, history lists 2 non-empty layers, but we have 4 layers on disk
END
