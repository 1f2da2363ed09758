FROM minibase
COPY dir /one
COPY dir/ /two/
COPY dir/sub /three/sub
COPY . /all/
