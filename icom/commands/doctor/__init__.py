"""`icom doctor`: `command` runs the checks, which are in the modules by subject."""
