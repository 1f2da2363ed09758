"""The command line: one module per noun, which parses arguments, calls the packages and prints results."""
