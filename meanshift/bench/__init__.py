"""The speed figures: ratios of contenders that take turns in one run, never bare seconds."""
