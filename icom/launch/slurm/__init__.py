"""`icom launch slurm`: the training as a job that goes on by itself."""
