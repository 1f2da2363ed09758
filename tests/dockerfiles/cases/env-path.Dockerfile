FROM minibase
ENV PATH=/opt/bin:$PATH
RUN echo $PATH > /out
