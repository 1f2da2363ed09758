"""Whether our verdicts are those of the benchmarks' own packages: the parts of verdict_parity.py."""
