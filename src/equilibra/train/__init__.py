"""The training program: configuration, processes, run folder, what a user sees. Needs torch and transformers."""
