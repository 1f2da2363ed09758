# Ruby with Debian's packages of gems.
ARG ROOT
FROM ${ROOT}
RUN apt-get update && apt-get install --yes --no-install-recommends gcc git libc6-dev make ruby ruby-dev \
    && rm -rf /var/lib/apt/lists/*
ARG PACKAGES
RUN apt-get update && apt-get install --yes --no-install-recommends ${PACKAGES} && rm -rf /var/lib/apt/lists/*
ARG WORKDIR
COPY repository ${WORKDIR}
WORKDIR ${WORKDIR}
ARG BUILD=true
RUN sh -c "${BUILD}"
