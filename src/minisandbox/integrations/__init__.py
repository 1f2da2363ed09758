"""Run other projects' agents and frameworks in this package's sandboxes; each integration needs an extra."""
