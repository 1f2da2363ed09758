FROM minibase
CMD ["base"]
ENTRYPOINT ["/start", "now"]
