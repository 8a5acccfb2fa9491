"""A small world of drawn objects: what the bundled model was trained on, what its concepts come from, who judges them.

- `scene`: what a picture of the world can show, how it is drawn and how it is described;
- `concepts`: combinations that the model has never seen, as things to learn;
- `judge`: a classifier that has seen the world's pictures only, none of the model's;
- `build`: makes model, judge and concept sets from a seed: `python -m tools.world.build`.
"""
