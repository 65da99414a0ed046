"""The paper's tables and ablations, at a scale that can be run: `meanshift reproduce`."""
