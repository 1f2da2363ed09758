FROM minibase
COPY --link a.txt /x/
COPY --link=false b.txt /x/
