FROM scratch
COPY --from=minibase /etc/debian_version /etc/
COPY --from=minibase /usr/share/base-files/ /files/
