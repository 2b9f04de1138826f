"""From files and sets to tokens and padded tensors."""
