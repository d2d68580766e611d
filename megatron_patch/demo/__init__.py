"""The embedded default: public-domain text, tasks with exact answers, and a small base trained from scratch on them."""
