# Adapted: the form of R2E-Gym's repository images.
# Different here: the clone is a COPY, uv is a plain virtual environment.
FROM devbase
ENV DEBIAN_FRONTEND=noninteractive
ARG OLD_COMMIT=main
RUN ln -sf /bin/bash /usr/local/bin/sh-of-r2e
COPY proj /testbed
RUN mkdir -p /r2e_tests && cp -r /testbed/tests/. /r2e_tests/ && echo "$OLD_COMMIT" > /testbed/.commit
WORKDIR /testbed
RUN python3 -m venv --without-pip .venv && ln -s /testbed/.venv /root/r2e-venv \
    && ln -s /testbed/.venv/bin/python /root/r2e-venv/bin/python-alias
RUN find . -name '*.pyc' -delete && find . -name '__pycache__' -exec rm -rf {} +
ENV VIRTUAL_ENV=/testbed/.venv
ENV PATH="$VIRTUAL_ENV/bin:$PATH"
#: arg OLD_COMMIT=0123abc
