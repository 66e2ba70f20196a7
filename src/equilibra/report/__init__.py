"""A run folder in, one self-contained HTML page or a Perfetto trace out."""
