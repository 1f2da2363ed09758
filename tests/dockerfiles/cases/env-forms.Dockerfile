FROM minibase
ENV A=1 B="two words" C=three\ words
ENV OLD the rest of the line
ENV Q="say \"x\"" S='$A'
RUN echo "$A|$B|$C|$OLD|$Q|$S" > /out
