"""Libraries that talk while they load: what they say of no consequence stays out of a rank's log."""

from __future__ import annotations

import logging
import warnings

_CHATTY = (
    "bitsandbytes.backends.cpu.ops",  # an optional kernel for inference on CPUs is not installed
    "DeepSpeed",
    "torch.distributed.elastic.multiprocessing.redirects",
)


def quiet() -> None:
    """Raise the level of chatty loggers and drop progress bars; errors are still said."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)
    # Old and new names of the same methods: both must work over the range of transformers that is supported.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
