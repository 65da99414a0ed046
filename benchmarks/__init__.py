"""The speed figures against others: `meanshift bench` runs these files from a clone.

`authors` is the baseline, the paper's method written plainly the way its authors' program works.
Each other file measures one table: contenders take turns in one run, and only ratios are told.
"""
