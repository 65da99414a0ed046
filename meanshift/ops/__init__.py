"""Tensor algorithms that know no dataset and no run."""
