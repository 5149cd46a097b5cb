"""What measures Samovar, in benchmarks/."""
