"""`icom evaluate`: pictures from many prompts, and how good they are."""
