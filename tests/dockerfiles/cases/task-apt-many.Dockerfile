# Adapted: the form of images that install a service with its user.
# Different here: the service is cron.
FROM minibase
ENV DEBIAN_FRONTEND=noninteractive
RUN apt-get update \
 && apt-get install -y --no-install-recommends cron netbase iputils-ping \
 && rm -rf /var/lib/apt/lists/*
COPY --chmod=644 c.md /etc/cron.d/job
RUN crontab -l || true
#: differs /usr/bin/ping no file capability can be set in a sandbox, so that the package makes it set-uid
