"""How the model is spread over the ranks: one module per way."""
