"""Options and output that several nouns share."""
