"""allranks: fine-tune a quantised model on many GPUs so that all ranks always act together."""

__version__ = "0.1.0"
