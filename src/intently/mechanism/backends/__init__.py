"""Ways to compute one and the same attention: each a function of checked `Inputs`, and what keeps it from computing them."""
