from rich.table import Table

from parashard.display.text_table import print_table


def test_a_table_in_a_pipe_is_not_wrapped(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    table = Table("key", "value", box=None)
    table.add_row("optimizer.schedule.warmup_steps", "x" * 200)
    print_table(table)
    assert f"optimizer.schedule.warmup_steps {'x' * 200}" in " ".join(capsys.readouterr().out.split())
