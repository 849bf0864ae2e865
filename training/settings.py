"""Environment variables of the commands, set before torch and tqdm are imported."""

# oneDNN compiles a kernel for each shape of a matrix product. By default it caches 1,024 of them, and PyTorch as many
# again per thread and type of product, at half a megabyte each. Caching hardly pays where the shapes change with every
# batch and step. Training in bfloat16 has few shapes.
KERNELS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32", "LRU_CACHE_CAPACITY": "16"}
TRAINING_KERNELS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128", "LRU_CACHE_CAPACITY": "32"}
BARS = {"TQDM_DELAY": "2"}  # seconds; progress bars of what takes less are not shown
