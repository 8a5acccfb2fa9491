"""What makes frozen networks fast on CPUs: packed layers, rewritten blocks, attention, allocator settings."""
