FROM minibase
COPY a.txt /new/name.txt
COPY a.txt relative
WORKDIR /w
COPY b.txt .
COPY b.txt sub/
COPY b.txt ./other
