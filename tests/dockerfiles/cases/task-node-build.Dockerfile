# Adapted: the form of a front end that is built in one stage and served from another.
# Different here: node is Debian's, nginx a directory.
ARG BASE=devbase
FROM ${BASE} AS deps
WORKDIR /app
COPY node/package.json node/
COPY node/local node/local/
RUN cd node && npm install --no-audit --no-fund --offline --cache /tmp/npm && rm -rf /tmp/npm /root/.npm node_modules/.package-lock.json
FROM deps AS build
COPY node/ node/
RUN cd node && npm run build --silent && rm -rf /root/.npm
FROM minibase AS serve
COPY --from=build --chown=www-data:www-data /app/node/dist /usr/share/html
EXPOSE 8080
HEALTHCHECK --interval=10s CMD test -d /usr/share/html
