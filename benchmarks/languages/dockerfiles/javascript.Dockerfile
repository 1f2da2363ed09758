# Node, and packages of npm's registry, which Node finds in a directory above the repository.
ARG ROOT
FROM ${ROOT}
RUN apt-get update && apt-get install --yes --no-install-recommends git nodejs npm && rm -rf /var/lib/apt/lists/*
ARG PACKAGES
WORKDIR /srv
RUN npm install --no-audit --no-fund --ignore-scripts ${PACKAGES}
ENV PATH=/srv/node_modules/.bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
ARG WORKDIR
COPY repository ${WORKDIR}
WORKDIR ${WORKDIR}
