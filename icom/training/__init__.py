"""The training run: its loop, its checkpoints, and what it shows and leaves."""
