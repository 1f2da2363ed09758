FROM minibase
COPY *.txt /x/
COPY ?.md /y/
COPY [ab].txt /z/
COPY dir/*.sh /bin2/
COPY d*/sub /w/
