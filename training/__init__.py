"""How the built-in model was made: data, tokenizers, training, evaluation and export, in order."""
