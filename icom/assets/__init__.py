"""The small pipeline and pictures that ship with icom, and the program that makes them (`build.py`)."""
