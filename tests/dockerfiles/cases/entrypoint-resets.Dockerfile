FROM minibase AS one
CMD ["inherited"]
FROM one
ENTRYPOINT ["/start"]
