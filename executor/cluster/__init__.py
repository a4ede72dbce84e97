"""Rollouts on the nodes of a Ray cluster. Needs `envherd[ray]`."""
