FROM minibase
RUN mkdir /k && cd /k && mkfifo fifo && ln -s nowhere dangling && echo h > h1 && ln h1 h2 && install -m 6755 /bin/true suid && mkdir -m 1777 sticky && mkdir -m 000 closed && touch "new\nline" "-dash" "*" && chown 12:34 h1 && chmod 0 dangling h2 || true
RUN cd /k && printf x > "$(printf "n%.0s" $(seq 250))" && mkdir -p $(seq -s/ 1 60) && touch $(seq -s/ 1 60)/deep
