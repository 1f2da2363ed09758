FROM minibase
ADD --chmod=600 a.txt /x
ADD --link b.txt /y/
ADD --exclude=sub --exclude=run.sh dir /d/
ADD --unpack=false archive.tar.gz /z/
