FROM minibase
RUN echo one > /one && echo "$HOME" > /home-is
RUN cd /opt; pwd > /where; umask > /umask
