FROM minibase
ARG A=default
ARG B
ARG C=c
RUN echo "$A $B $C" > /out
LABEL a=$A b=$B
#: arg A=given
#: arg B=b
