# Adapted: the form of SWE-bench's instance images.
# Different here: the clone is a COPY of a small project, the commit has a fixed date.
FROM devbase
COPY ./proj /testbed
WORKDIR /testbed/
ENV GIT_AUTHOR_DATE="2024-01-01T00:00:00Z" GIT_COMMITTER_DATE="2024-01-01T00:00:00Z"
RUN git init -q -b main . && git config user.email setup@example.org && git config user.name setup \
 && git add -A && git commit -q -m base && rm .git/index .git/hooks/*
RUN python3 -m unittest -q tests/test_proj.py; find / -xdev -name __pycache__ -prune -exec rm -r {} +
