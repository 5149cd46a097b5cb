"""How was the built-in model made? Data, tokenizers, training, evaluation and export, in order."""
