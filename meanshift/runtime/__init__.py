"""The process and its files: devices, processes, randomness, run directories, checkpoints."""
