"""Programs that make this project's documents and bundled weights; not part of the installed package."""
