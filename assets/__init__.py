"""The four steps as software-defined assets, thin over `assets.steps` and `assets.frames`."""
