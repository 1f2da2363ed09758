FROM minibase
COPY --chown=1000:1000 a.txt /x
COPY --chown=77 b.txt /y
