# The second: pinned dependencies in a prefix.
ARG BASE
FROM ${BASE}
ARG PREFIX
COPY requirements.txt /root/requirements.txt
RUN python3 -m venv ${PREFIX}
RUN --mount=type=bind,source=wheels,target=/wheels \
    ${PREFIX}/bin/pip install --no-cache-dir --no-index --find-links /wheels -r /root/requirements.txt
RUN echo "export PATH=${PREFIX}/bin:\$PATH" >> /root/.bashrc
ENV PATH=${PREFIX}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
WORKDIR /testbed
