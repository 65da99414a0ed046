"""The live page: serves a run to a browser on this machine, while it trains and after."""
