# After commands of the image's own: a repository, a link or a file that they left as .git must not become the agent's.
rm -rf .git
settle .
