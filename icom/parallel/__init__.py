"""The processes of a run: which place each has, how they meet, and who notices that one is gone."""
