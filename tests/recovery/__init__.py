"""Recovery as a whole: a publisher's real parts, a network that loses and delays, readers of several kinds."""
