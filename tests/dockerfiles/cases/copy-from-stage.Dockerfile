FROM minibase AS build
RUN mkdir /out && echo x > /out/x && chmod 4755 /out/x && chown 5:6 /out/x && ln -s x /out/l && mkdir -m 1777 /out/t
FROM minibase
COPY --from=build /out /got
COPY --from=build /out/x /got2/
COPY --from=build --chown=7:8 /out/x /got3
