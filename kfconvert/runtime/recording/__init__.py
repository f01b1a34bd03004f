"""Programs of captured graphs, and their recordings as CUDA graphs."""
