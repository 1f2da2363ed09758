# Adapted: the form of OpenSWE's generated Dockerfiles.
# Different here: the base image is the Debian base, the clone a COPY.
FROM devbase
ARG BASE_COMMIT=abc
ENV REPO_DIR=/testbed BASE=$BASE_COMMIT
RUN mkdir -p ${REPO_DIR}
COPY proj/ ${REPO_DIR}/
WORKDIR ${REPO_DIR}
RUN git init -q . && git apply --check fix.patch && git apply fix.patch && rm -rf .git && head -2 proj/__init__.py > /patched
RUN echo "${BASE}" > /base
