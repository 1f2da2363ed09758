"""The command line: one module per noun, which parses and prints and leaves the work to the packages."""
