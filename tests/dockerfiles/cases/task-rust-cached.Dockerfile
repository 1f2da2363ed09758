# Adapted: the form of a Rust image with cached builds.
# Different here: rust is Debian's, the crate has no dependencies.
FROM devbase AS build
WORKDIR /src
COPY rust .
RUN --mount=type=cache,target=/target --mount=type=cache,target=/tmp/cargo \
    CARGO_HOME=/tmp/cargo cargo build --offline --release --target-dir /target && /target/release/app > /answer
FROM minibase
COPY --from=build /answer /answer
