"""Agent conversations: the canonical form, and the parsers of the forms that producers send."""
