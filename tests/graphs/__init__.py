"""Graphs, real and simulated."""
