"""Pictures, by what they show; `style` is what they share."""
