"""A Llama trained on the text of the Python standard library."""
