FROM minibase
RUN useradd -m -u 1500 joe && groupadd -g 1600 crew
USER joe
RUN id -u > /tmp/id && id -g >> /tmp/id && echo $HOME >> /tmp/id && touch ~/mine
USER joe:crew
RUN id -g > /tmp/gid
USER 1700:1800
RUN id -u > /tmp/num && id -g >> /tmp/num
USER root
RUN chmod 600 /tmp/id
