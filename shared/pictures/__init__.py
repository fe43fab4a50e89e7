"""Pictures as clients send them: opened, brought to size, and given their places in a prompt."""
