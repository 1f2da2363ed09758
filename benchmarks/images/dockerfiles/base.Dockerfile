# The first of SWE-bench's three layers: packages and an interpreter.
ARG ROOT
FROM ${ROOT}
ENV TZ=Etc/UTC
RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
    build-essential ca-certificates curl git jq libffi-dev libtiff-dev locales tzdata wget \
    python3 python3-dev python3-pip python3-venv python-is-python3 \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --shell /bin/bash nonroot
