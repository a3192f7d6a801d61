"""How is a convolution computed without a convolution library? One file for each way."""
