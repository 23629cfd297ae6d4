"""The work of the reference processors: small pure functions, and the two handlers made of them."""
