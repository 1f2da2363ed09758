FROM minibase
ENV A=env
ARG A=arg
RUN echo "[$A]" > /out
LABEL a=$A
#: arg A=given
