"""An HTTP server with OpenAI's interface for one model, whose requests take turns."""
