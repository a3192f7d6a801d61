"""Image decoding, cropping and resizing."""
