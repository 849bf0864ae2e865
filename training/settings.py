"""Settings of the process, made before torch is imported."""

# oneDNN compiles a kernel for every shape of a matrix product. By default it keeps 1,024 of them, and PyTorch as many
# again for each thread and kind of product, half a megabyte each; but shapes change with every batch and step.
KERNELS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32", "LRU_CACHE_CAPACITY": "16"}
