"""`icom data pipeline`: from a list of addresses to a trained model, in stages, parts and marks of what is whole."""
