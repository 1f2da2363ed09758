FROM minibase
RUN mkdir -m 700 /there
COPY a.txt /there
COPY dir /there
COPY dir /there/dir
