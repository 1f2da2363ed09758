"""Coverage-guided fuzzing of the parsers of untrusted files: `make fuzz-parsers`."""
