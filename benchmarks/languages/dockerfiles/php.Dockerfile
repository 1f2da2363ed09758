# PHP with Composer's autoloader, and Debian's packages of libraries.
ARG ROOT
FROM ${ROOT}
RUN apt-get update && apt-get install --yes --no-install-recommends composer git php-cli php-mbstring php-xml phpunit \
    && rm -rf /var/lib/apt/lists/*
ARG PACKAGES
RUN apt-get update && apt-get install --yes --no-install-recommends ${PACKAGES} && rm -rf /var/lib/apt/lists/*
ARG LIBRARIES
RUN echo '<?php' > /opt/libraries.php \
    && for name in ${LIBRARIES}; do echo "require_once '/usr/share/php/$name/autoload.php';" >> /opt/libraries.php; done \
    && echo 'auto_prepend_file=/opt/libraries.php' > "$(ls -d /etc/php/*/cli/conf.d)/99-libraries.ini"
ARG WORKDIR
COPY repository ${WORKDIR}
WORKDIR ${WORKDIR}
RUN COMPOSER_ALLOW_SUPERUSER=1 composer dump-autoload --no-interaction
