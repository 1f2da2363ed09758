# Node with npm: the newest packages of a day that fit package.json.
ARG ROOT
FROM ${ROOT}
RUN apt-get update && apt-get install --yes --no-install-recommends git nodejs npm && rm -rf /var/lib/apt/lists/*
ARG WORKDIR
COPY repository ${WORKDIR}
WORKDIR ${WORKDIR}
ARG BEFORE
RUN npm install --before "${BEFORE}" --ignore-scripts --no-audit --no-fund
