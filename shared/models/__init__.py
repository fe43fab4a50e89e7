"""What a checkpoint is: the model's config, and which tensor lies where."""
