"""The commands besides training, measuring and launching."""
