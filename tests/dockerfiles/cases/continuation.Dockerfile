FROM minibase
RUN echo a \
  # a comment between

  && echo b \
  > /out && \
  touch /end
