"""What several tests share: models, changes made to them, and measures."""
