"""How was the built-in video model made? `python -m training.motion.data`, then `python -m training.motion.train`."""
