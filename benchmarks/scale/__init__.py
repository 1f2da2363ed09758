"""What the store takes for whole data sets, computed: the parts of paper_scale.py."""
