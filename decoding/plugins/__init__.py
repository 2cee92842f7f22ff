"""Output plugins: callbacks that make text, JSON or pgoutput's own messages of what a slot sends."""
