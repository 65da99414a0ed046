"""What is done to samples: training views and evaluation transforms."""
