FROM minibase
COPY archive.tar.gz /x/
ADD *.md /y/
