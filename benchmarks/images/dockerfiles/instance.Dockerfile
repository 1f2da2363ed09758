# The third: the repository at a commit, installed from where it lies.
ARG ENVIRONMENT
FROM ${ENVIRONMENT}
ARG COMMIT
ARG USER=root
RUN --mount=type=bind,source=repository,target=/source \
    git config --global --add safe.directory '*' && \
    git clone --quiet --origin origin /source /testbed && chmod -R 777 /testbed && \
    git reset --quiet --hard ${COMMIT} && git remote remove origin
RUN python -m pip install --no-cache-dir --no-index --no-build-isolation --no-deps -e .
USER ${USER}
