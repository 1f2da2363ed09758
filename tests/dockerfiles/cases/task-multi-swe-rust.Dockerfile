# Adapted: the form of Multi-SWE-bench's Rust images.
# Different here: rust is Debian's, the result of the build is thrown away.
FROM devbase
WORKDIR /home
COPY rust app
RUN cd app && CARGO_HOME=/tmp/cargo cargo build --offline --target-dir /tmp/target && /tmp/target/debug/app > /home/result && rm -rf /tmp/target /tmp/cargo
COPY <<'EOF' /home/prepare.sh
#!/bin/bash
cargo test || true
EOF
RUN bash -n /home/prepare.sh
