"""Values that the options of commands accept and print, in a module that imports nothing heavy."""

import re


# Output formats of translations; see `formats`.
FORMATS = ("text", "nbest", "jsonl", "tree")
# Engines of `translate`, the default first.
ENGINES = ("torch", "ctranslate2")
# Methods of `alignment`: attention at the better of two positions, or at the given one; or erasure.
METHODS = ("attention", "shift", "naive", "erasure")
# Kinds of attention, with their titles in pictures and pages.
TITLES = {"encoder": "encoder self-attention", "decoder": "decoder self-attention", "cross": "cross-attention"}

MAX_SOURCE_TOKENS = 1024  # default for models whose positions have no limit

# Form of a licence identifier of the Hub; there is no offline list of them.
LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]*")
