"""Known faults, and the script that checks that the tests find them."""
