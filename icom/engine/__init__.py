"""What makes frozen networks fast: here so far the allocator settings and attention in blocks."""
