"""`icom launch kubernetes`: what is checked here (checks.py), the objects (manifests.py), kubectl (command.py)."""
