"""Model cards, the records they are written from, and the push to the Hub."""
