"""What the fork server loads before the first rank starts."""
