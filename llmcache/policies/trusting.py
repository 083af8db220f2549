"""What most policies have in common: nothing but the budget makes keys leave, and no entry is doubted."""


class Trusting:
    """Answers for policies that neither let keys expire nor check what is reused."""

    def expired(self) -> list[str]:
        """Name none: only the budget makes keys leave."""
        return []

    def should_check(self, key: str) -> bool:
        """Never."""
        return False

    def on_check(self, key: str, divergence: float) -> None:
        """Change nothing."""
