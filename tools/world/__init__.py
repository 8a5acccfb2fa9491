"""Make and measure what ships with icom."""
