"""Does a node keep its promises: controls, their outcomes, and what is written down about them."""
