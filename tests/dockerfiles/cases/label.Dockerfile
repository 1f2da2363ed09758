FROM minibase
LABEL a=1 b="two words" c=three
LABEL "quoted.key"="v"
LABEL d e f
LABEL multi="line\
continued"
ARG X=x
LABEL var=$X-y
