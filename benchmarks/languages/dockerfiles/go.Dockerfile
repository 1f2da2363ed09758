# Go in GOPATH mode, with Debian's packages of libraries.
ARG ROOT
FROM ${ROOT}
RUN apt-get update && apt-get install --yes --no-install-recommends git golang-go && rm -rf /var/lib/apt/lists/*
ARG PACKAGES
RUN if [ -n "${PACKAGES}" ]; then apt-get update && apt-get install --yes --no-install-recommends ${PACKAGES} \
    && rm -rf /var/lib/apt/lists/*; fi
ENV GO111MODULE=off GOPATH=/go:/usr/share/gocode
ARG WORKDIR
COPY repository ${WORKDIR}
WORKDIR ${WORKDIR}
# the test command then compiles only what changed
RUN go test -run '^$' ./... || true
