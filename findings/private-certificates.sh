#!/usr/bin/env bash
# uv 0.13.8, pip 26.3, requests 2.34.2, httpx 0.28.1, git 2.39.5 (Debian 12): no variable makes all of them trust a private
# certificate authority.
#
# Expected: SSL_CERT_FILE, OpenSSL's own variable, names the trusted certificates for every client of HTTPS.
# Observed: uv and httpx read SSL_CERT_FILE, requests reads REQUESTS_CA_BUNDLE, pip reads either, git only GIT_SSL_CAINFO.
# Why it matters: behind a company's proxy, a sandbox in which pip works can still fail in uv, in httpx (huggingface_hub)
#           or in `git clone`. A sandbox has to set all three variables.
set -euo pipefail
work=$(mktemp -d)
trap 'kill "${server:-}" 2>/dev/null || true; rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -q 'uv==0.13.8' 'pip==26.3' 'requests==2.34.2' 'httpx==0.28.1'
echo "$(git --version), recorded with 2.39.5"

openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=private -keyout ca.key -out ca.pem 2>/dev/null
openssl req -newkey rsa:2048 -nodes -subj /CN=127.0.0.1 -keyout key.pem -out request.pem 2>/dev/null
echo 'subjectAltName=IP:127.0.0.1' >extensions
openssl x509 -req -in request.pem -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile extensions -out cert.pem 2>/dev/null
mkdir empty
cat >serve.py <<'END'
import functools
import http.server
import os
import ssl

handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory="empty")
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain("cert.pem", "key.pem")
server.socket = context.wrap_socket(server.socket, server_side=True)
with open("port.new", "w") as file:
    file.write(str(server.server_port))
os.rename("port.new", "port")
server.serve_forever()
END
venv/bin/python serve.py >server.log 2>&1 &
server=$!
until [ -e port ]; do kill -0 "$server"; sleep 0.1; done
url=https://127.0.0.1:$(cat port)

# Print the variable if the client completes the handshake with it. The server has no content: every client then fails later.
try() {
    local variable=$1
    shift
    env -i PATH="$PATH" HOME="$work" ${variable:+"$variable=$work/ca.pem"} "$@" >log 2>&1 || true
    grep -qiE 'certificate' log || echo " ${variable:-nothing}"
}
clients() {
    local name=$1 variable
    shift
    printf '%s trusts the authority with:' "$name"
    for variable in '' SSL_CERT_FILE REQUESTS_CA_BUNDLE GIT_SSL_CAINFO; do try "$variable" "$@"; done | tr -d '\n'
    echo
}
{
    clients uv venv/bin/uv pip install --no-config --no-cache --python venv/bin/python --index-url "$url" absent
    clients httpx venv/bin/python -c "import httpx; httpx.get('$url')"
    clients pip venv/bin/pip --isolated --retries 0 download --no-cache-dir --index-url "$url" absent
    clients requests venv/bin/python -c "import requests; requests.get('$url')"
    clients git git ls-remote "$url/absent"
} >observed
cat observed
diff - observed <<'END' || { echo "the variables that HTTPS clients read have changed" >&2; exit 1; }
uv trusts the authority with: SSL_CERT_FILE
httpx trusts the authority with: SSL_CERT_FILE
pip trusts the authority with: SSL_CERT_FILE REQUESTS_CA_BUNDLE
requests trusts the authority with: REQUESTS_CA_BUNDLE
git trusts the authority with: GIT_SSL_CAINFO
END
