FROM minibase
ADD archive.tar /plain/
ADD archive.tar.gz /gz
ADD archive.tar.xz /xz/
ADD archive.tar.bz2 /bz/
