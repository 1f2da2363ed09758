FROM minibase
COPY alink /x/
COPY dir/link /y
COPY dirlink /z/
COPY dirlink/sub /v/
