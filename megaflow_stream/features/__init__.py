"""Features: conversations as tokens with a loss mask, packed into sequences; one record is one packed sequence."""
