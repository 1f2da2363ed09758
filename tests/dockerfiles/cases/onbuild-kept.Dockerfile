FROM minibase
ONBUILD RUN touch /later
ONBUILD COPY . /src
#: tree no buildah runs the triggers when it mounts the image
