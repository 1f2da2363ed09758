FROM minibase
COPY --chmod=640 a.txt /x
COPY --chmod=755 dir /d/
