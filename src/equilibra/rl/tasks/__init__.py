"""What a model is trained on: problems, and how good an answer is."""
