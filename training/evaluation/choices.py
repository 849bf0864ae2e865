"""Values that the options of commands accept and print, in a module that imports nothing."""

METRICS = ("bleu", "chrf", "chrf++", "ter", "compound-bleu")
BRACKETING = "bracketing"  # of trees, not of translations
DEFAULT_METRICS = ("bleu", "chrf", "chrf++", "ter")
TOKENIZERS = ("13a", "intl", "char", "none")
LANGUAGES = ("de", "en")  # of compound-split BLEU
COMET_MODEL = "Unbabel/wmt22-comet-da"
