"""Other people's software: each part of this room stands alone, and only here are their libraries imported."""
