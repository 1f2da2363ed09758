FROM minibase
RUN mkdir -p /m/one/two && touch /m/one/two/f
RUN mv /m/one /m/moved && ln -s moved /m/one
RUN chmod 700 /m/moved && chown 9:9 /m/moved/two/f && echo more >> /m/moved/two/f
