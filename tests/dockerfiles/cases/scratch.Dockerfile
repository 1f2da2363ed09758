FROM scratch
COPY a.txt /
COPY dir /d/
