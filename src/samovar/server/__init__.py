"""An OpenAI-compatible server and its page."""
