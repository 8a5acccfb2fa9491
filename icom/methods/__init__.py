"""What is learned: one module for each method, and the files that it leaves."""
