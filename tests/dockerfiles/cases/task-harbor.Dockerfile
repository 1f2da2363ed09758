# Adapted: the form of Harbor's tasks.
# Different here: the base image is the Debian base, pip installs nothing.
FROM devbase
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV LANG=C.UTF-8 \
    PIP_NO_CACHE_DIR=1 \
    PYTHONUNBUFFERED=1
WORKDIR /workspace
COPY . .
RUN find . -type f -print0 | sort -z | xargs -0 sha256sum | tee /manifest > /dev/null
RUN mkdir -p /logs/verifier /solution && chmod 777 /logs/verifier
