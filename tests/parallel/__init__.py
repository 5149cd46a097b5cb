"""A package, so that the ranks that tests start can import what they are to run."""
