"""Caption templates of the textual inversion paper (Gal et al. 2022, arXiv:2208.01618), as in diffusers' script."""

_OBJECT = {
    "a photo of": "a|my|the|one|a clean|a dirty|a nice|a cool|a small|the cool|the clean|the nice|the small"
    "|the weird|the large",
    "a cropped photo of": "a|the",
    "a close-up photo of": "a|the",
    "a good photo of": "a|the",
    "a rendition of": "a|the",
    "a rendering of": "a",
    "a dark photo of": "the",
    "a bright photo of": "the",
    "the photo of": "a",
}
# Two stand twice, as in the original: each template is drawn with equal probability.
_STYLE = (
    "a painting|a rendering|a cropped painting|the painting|a clean painting|a dirty painting|a dark painting"
    "|a picture|a cool painting|a close-up painting|a bright painting|a cropped painting|a good painting"
    "|a close-up painting|a rendition|a nice painting|a small painting|a weird painting|a large painting"
)

TEMPLATES: dict[str, tuple[str, ...]] = {
    "object": tuple(f"{lead} {article} {{}}" for lead, ends in _OBJECT.items() for article in ends.split("|")),
    "style": tuple(f"{picture} in the style of {{}}" for picture in _STYLE.split("|")),
}
"""learnable_property -> captions; `{}` stands for the placeholder token."""
