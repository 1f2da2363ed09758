FROM minibase
ENV V=1.2.3 E=
ENV A=${V} B=$V-x C=${U:-def} D=${V:+set} F=${U:+set} G=${E:-empty} H=\$V I=${U}
RUN env | grep "^[A-I]=" | sort > /out
