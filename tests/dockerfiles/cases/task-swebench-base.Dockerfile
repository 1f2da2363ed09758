# Adapted: the form of SWE-bench's base images.
# Different here: Ubuntu is the Debian base; Miniconda is a virtual environment.
FROM --platform=linux/amd64 devbase
ARG DEBIAN_FRONTEND=noninteractive
ENV TZ=Etc/UTC
RUN apt update && apt install -y --no-install-recommends \
jq \
tzdata \
&& rm -rf /var/lib/apt/lists/*
RUN python3 -m venv --without-pip /opt/miniconda3
ENV PATH=/opt/miniconda3/bin:$PATH
RUN adduser --disabled-password --gecos 'dog' nonroot
