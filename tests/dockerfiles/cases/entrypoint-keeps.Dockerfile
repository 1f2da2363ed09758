FROM minibase AS one
ENTRYPOINT ["/start"]
FROM one
CMD ["mine"]
