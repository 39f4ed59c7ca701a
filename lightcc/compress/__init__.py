"""Compression of gradients, for all frameworks: codecs, what they leave behind, and who decides which is used."""
