"""What the processes say to each other: every message, ticket and stored record, one codec, one file that touches Flight."""
