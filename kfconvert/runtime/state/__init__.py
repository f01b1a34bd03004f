"""What a model holds, and how a converted model detects that it has changed."""
