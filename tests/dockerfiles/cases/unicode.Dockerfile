FROM minibase
ENV U="ümläut ✓"
RUN echo "$U" > "/über"
LABEL u=$U
