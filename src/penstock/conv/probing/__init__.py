"""Does the convolution library of this machine work? Tried out in processes that may die."""
