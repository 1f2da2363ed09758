FROM minibase
MAINTAINER Some Body <some@example.org>
