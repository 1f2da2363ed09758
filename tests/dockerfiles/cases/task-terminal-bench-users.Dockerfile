# Adapted: the form of Terminal-Bench's tasks with users and services.
# Different here: sshd is not installed.
FROM minibase
RUN apt-get update && apt-get install -y --no-install-recommends procps && rm -rf /var/lib/apt/lists/*
RUN groupadd -r staff2 && useradd -r -g staff2 -d /srv/app -s /usr/sbin/nologin app \
 && useradd -m -s /bin/bash agent && echo 'agent ALL=(ALL) NOPASSWD: ALL' > /etc/agent-rights && chmod 0440 /etc/agent-rights
COPY --chown=app:staff2 --chmod=750 dir/ /srv/app/
RUN chown -R app:staff2 /srv && chmod g+s /srv/app && install -d -o agent -g agent -m 700 /srv/agent-keys
USER agent
WORKDIR /home/agent
RUN touch notes && id -un > who
EXPOSE 22
CMD ["sleep", "infinity"]
