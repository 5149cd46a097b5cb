"""The lab, on tiny pipelines."""
