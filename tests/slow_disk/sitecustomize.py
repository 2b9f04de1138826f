"""A slow disk: with this folder on PYTHONPATH, making the folder of a checkpoint takes ALLRANKS_TEST_DISK_S seconds.

That is before the first of its files is written, so training is well ahead by then.
"""

import os
import time

_mkdir = os.mkdir


def _slow(path, *arguments, **more):  # type: ignore[no-untyped-def]
    if "/checkpoints/step-" in os.fspath(path):
        time.sleep(float(os.environ["ALLRANKS_TEST_DISK_S"]))
    return _mkdir(path, *arguments, **more)


os.mkdir = _slow
