"""Find, check and load the frozen model, from whichever place and in whichever form people have it."""
