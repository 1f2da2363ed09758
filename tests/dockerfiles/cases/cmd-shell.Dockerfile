FROM minibase
CMD echo "$HOME" && exec bash
