FROM minibase
RUN [ -d /etc ] && touch /yes
