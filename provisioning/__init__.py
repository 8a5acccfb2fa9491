"""EC2 clusters for icom. Empty in this release: `icom provision` is not built yet (see CHANGELOG.md)."""
