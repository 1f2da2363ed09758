# Adapted: the form of SWE-agent's own image.
# Different here: Ubuntu is the Debian base, Miniconda is left out.
FROM devbase
ARG TARGETARCH
RUN apt-get update && apt-get install -y --no-install-recommends jq && rm -rf /var/lib/apt/lists/*
RUN git config --global user.email "agent@example.org"
RUN git config --global user.name "agent"
ENV ROOT='/dev/'
RUN prompt() { echo " > "; };
ENV PS1="> "
RUN touch /root/files_to_edit.txt
RUN touch /root/test.patch
RUN echo "alias ls='ls -F'" >> /root/.bashrc
WORKDIR /
CMD ["/bin/bash"]
