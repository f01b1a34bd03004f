"""The state of a model, and how a converted model detects that it has changed."""
