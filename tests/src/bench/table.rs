//! Renders figures in columns, and compares them to targets.

pub(crate) const MIB: f64 = 1024.0 * 1024.0;

pub(crate) fn fixed(value: f64, digits: usize) -> String {
    format!("{value:.digits$}")
}

pub(crate) fn verdict(target: f64, value: f64) -> &'static str {
    if value <= target { "met" } else { "missed" }
}

pub(crate) fn at_most(target: f64, value: f64) -> String {
    format!("<= {target}: {}", verdict(target, value))
}

/// Renders a table. The first column is a label and the last one a target. All others are aligned right.
pub(crate) fn table<const COLUMNS: usize>(
    headers: [&str; COLUMNS],
    rows: &[[String; COLUMNS]],
) -> String {
    let headers = headers.map(str::to_owned);
    let lines: Vec<_> = std::iter::once(&headers).chain(rows).collect();
    let width = |column: usize| {
        lines
            .iter()
            .filter_map(|row| row.get(column))
            .map(String::len)
            .max()
            .unwrap_or_default()
    };
    let mut text = String::new();
    for row in &lines {
        let mut line = String::new();
        for (column, cell) in row.iter().enumerate() {
            line += &match column {
                0 => format!("{cell:<0$}", width(column)),
                last if last + 1 == COLUMNS => format!("  {cell}"),
                _ => format!("  {cell:>0$}", width(column)),
            };
        }
        text += line.trim_end();
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_fit_widest_cell_without_trailing_spaces() {
        let row = |cells: [&str; 4]| cells.map(str::to_owned);
        let rows = [
            row(["a", "123456789", "1", ""]),
            row(["bc", "2", "", "<= 3: met"]),
        ];
        let expected = "\
figure       ours  theirs  target
a       123456789       1
bc              2          <= 3: met
";
        assert_eq!(
            table(["figure", "ours", "theirs", "target"], &rows),
            expected
        );
    }

    #[test]
    fn a_target_is_met_up_to_its_value() {
        assert_eq!(at_most(0.5, 0.5), "<= 0.5: met");
        assert_eq!(at_most(0.5, 0.51), "<= 0.5: missed");
    }
}
