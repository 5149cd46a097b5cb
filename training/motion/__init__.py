"""How the built-in video model was made: `python -m training.motion.data`, then `python -m training.motion.train`."""
