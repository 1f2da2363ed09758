# Adapted: the form of SWE-bench Pro's JavaScript images.
# Different here: node is Debian's, the packages are local.
FROM devbase
ENV NODE_ENV=development CI=1
WORKDIR /app
COPY node/package.json ./
COPY node/local ./local
RUN npm install --no-audit --no-fund --offline --cache /tmp/npm && rm -rf /tmp/npm /root/.npm node_modules/.package-lock.json
COPY node/ .
RUN npm test --silent && rm -rf /root/.npm
ENTRYPOINT ["/bin/bash"]
