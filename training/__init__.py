"""Commands of `hf-vaswani`, one module each. The subpackages implement them."""

import logging


# transformers imports torchao where it is installed, and torchao then logs its missing extensions and its use of
# deprecated parts of PyTorch. Neither concerns the user of a command, so these messages alone are filtered out.
_NOTICES = {
    "torchao": ("Failed to load", "Skipping import of cpp extensions"),
    "torch.utils._pytree": ("%s is an Enum subclass",),
}


def _is_no_notice(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_NOTICES[record.name])


for _name in _NOTICES:
    logging.getLogger(_name).addFilter(_is_no_notice)
