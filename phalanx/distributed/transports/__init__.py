"""Ways for the ranks of a group to exchange tensors: shared memory on a node, TCP between nodes, NCCL between GPUs."""
