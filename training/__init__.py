"""The commands, one file each, over the folders that do the work."""

import logging


# Where torchao is installed, transformers imports it, and it reports at once what it lacks and what of PyTorch it uses
# that is deprecated. Neither concerns the user of a command. All else that the two log is shown.
_NOTICES = {
    "torchao": ("Failed to load", "Skipping import of cpp extensions"),
    "torch.utils._pytree": ("%s is an Enum subclass",),
}


def _is_no_notice(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_NOTICES[record.name])


for _name in _NOTICES:
    logging.getLogger(_name).addFilter(_is_no_notice)
