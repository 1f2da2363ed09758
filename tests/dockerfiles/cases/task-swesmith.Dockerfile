# Adapted: the form of SWE-smith's profiles.
# Different here: the base is the Debian base, the clone a COPY, conda a virtual environment.
FROM devbase
RUN git config --global user.email "x@example.org" && git config --global user.name "x"
COPY proj /testbed
WORKDIR /testbed
RUN python3 -m venv --without-pip /opt/env && . /opt/env/bin/activate && python -B -m unittest tests/test_proj.py
SHELL ["/bin/bash", "-c"]
RUN source /opt/env/bin/activate && echo "$VIRTUAL_ENV" > .env-path
