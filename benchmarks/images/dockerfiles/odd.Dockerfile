# What container images may hold and seldom do: whatever an unpacker gets wrong.
ARG INSTANCE
FROM ${INSTANCE}
ARG USER=root
ARG WORKDIR=/testbed
COPY odd.py /root/odd.py
RUN python3 /root/odd.py make
RUN python3 /root/odd.py change
RUN python3 /root/odd.py replace && rm /root/odd.py
WORKDIR ${WORKDIR}
USER ${USER}
