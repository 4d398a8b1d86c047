"""The search and the ablation of the packing paper (Liu et al., arXiv:2002.02885), and what packs are held against."""
