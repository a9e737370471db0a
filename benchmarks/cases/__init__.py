"""Public reports reproduced: the release that had the fault and the nearest one without it, each checked in its own environment."""
