FROM minibase
RUN echo "[$A]" > /before
ARG A=1
RUN echo "[$A]" > /after
ENV A=env
RUN echo "[$A]" > /env
