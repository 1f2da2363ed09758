FROM minibase
RUN mkdir -p /r/a/b /r/c && touch /r/a/b/1 /r/a/2 /r/c/3 /r/4
RUN rm -r /r/a && rm /r/4 && mkdir /r/a && touch /r/a/new && rm -r /r/c && touch /r/c
RUN rm /r/a/new && rmdir /r/a && rm /etc/debian_version
