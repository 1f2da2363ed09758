FROM minibase
RUN ["/bin/sh", "-c", "echo $0 $1 > /args", "zero", "one two"]
RUN ["touch", "/a b"]
