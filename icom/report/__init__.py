"""report.html: a run on one page that needs nothing beside it: curves, pictures, options, machine, what to try."""
