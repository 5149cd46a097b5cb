"""Which parts of the documentation are made from code and results, and how?"""
