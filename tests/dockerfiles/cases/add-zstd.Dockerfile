FROM minibase
ADD archive.tar.zst /zst/
