"""What is measured, side by side with a peer, in one command each."""
