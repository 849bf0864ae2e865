"""Commands of `hf-vaswani`, one module each. The subpackages implement them."""
