"""Found by Hydra, which looks for sweepers in ``hydra_plugins`` alone."""
