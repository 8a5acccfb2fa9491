"""icom teaches a frozen Stable Diffusion model a new word from a handful of pictures (textual inversion)."""

__version__ = "0.1.0"
