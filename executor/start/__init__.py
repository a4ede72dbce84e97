"""How the helper process and workers are started."""
