"""Processes forked off one that has imported what commands need: importing takes longer than most tests.

The standard library's fork server; unlike the process of the tests, it has no threads and has used no accelerator.
"""

import multiprocessing


WARM = multiprocessing.get_context("forkserver")
WARM.set_forkserver_preload(["training.inference.file_translation", "training.trainer.run"])
