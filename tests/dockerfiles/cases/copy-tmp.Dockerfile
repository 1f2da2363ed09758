FROM minibase
COPY a.txt /tmp/
RUN cat /tmp/a.txt > /out && echo kept > /tmp/kept
RUN cat /tmp/kept >> /out
