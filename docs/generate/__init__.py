"""Parts of the documentation that are made from code and results."""
