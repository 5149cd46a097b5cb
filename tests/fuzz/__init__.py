"""Whatever somebody else sends or provides ends in no more than an error message.

Each case of each target is made from a seed of its own, so a failure names what makes it again. Some cases run with
every test; `make test-fuzz` runs for FUZZ_SECONDS in all, from a new seed each time, or from FUZZ_SEED.
"""
