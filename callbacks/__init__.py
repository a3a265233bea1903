"""Lightning callbacks of the training job, one a file."""
