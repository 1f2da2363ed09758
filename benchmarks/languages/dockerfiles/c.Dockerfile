# C and C++ with CMake, built at the base commit, so that the test command compiles only what changed.
ARG ROOT
FROM ${ROOT}
RUN apt-get update && apt-get install --yes --no-install-recommends cmake g++ git make && rm -rf /var/lib/apt/lists/*
ARG PACKAGES
RUN if [ -n "${PACKAGES}" ]; then apt-get update && apt-get install --yes --no-install-recommends ${PACKAGES} \
    && rm -rf /var/lib/apt/lists/*; fi
ARG WORKDIR
COPY repository ${WORKDIR}
WORKDIR ${WORKDIR}
ARG OPTIONS
RUN cmake -B /build ${OPTIONS} && cmake --build /build --parallel
