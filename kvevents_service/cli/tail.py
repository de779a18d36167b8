import click
@click.command()
def tail() -> None:
    """x"""
