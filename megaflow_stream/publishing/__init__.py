"""Conversations into `conversations.raw`: files by `publish.publish`, a program's own by `publisher.Publisher`."""
