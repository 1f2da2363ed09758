FROM minibase
RUN mkdir -p /real/deep && ln -s /real /link && ln -s ../real/deep /opt/rel
COPY a.txt /link/
COPY dir /opt/rel/
COPY b.txt /link/new/name
