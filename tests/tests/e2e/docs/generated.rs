//! Generated parts of the pages in `docs/reference/`.

use krypton_runtime::args::page::check_part;

use crate::docs_commands::pages::root;

/// Verifies or rewrites the generated part of a page in `docs/reference/`. See [`check_part`].
pub(crate) fn check(page: &str, part: &str) -> Result<(), String> {
    check_part(&root().join("docs/reference").join(page), part)
}

/// Returns a table. A column without any text is left out.
pub(crate) fn table<const N: usize>(head: [&str; N], rows: &[[String; N]]) -> String {
    let used: Vec<usize> = (0..N)
        .filter(|column| rows.iter().any(|row| !row[*column].is_empty()))
        .collect();
    let line = |cells: &[&str]| {
        let cells = used.iter().map(|column| cells[*column]);
        let cells = cells.map(|cell| cell.replace('|', "\\|").replace('\n', " "));
        format!("| {} |\n", cells.collect::<Vec<_>>().join(" | "))
    };
    let mut table = line(&head) + &line(&["---"; N]);
    for row in rows {
        table += &line(&row.each_ref().map(String::as_str));
    }
    table
}

pub(crate) fn code(text: &str) -> String {
    format!("`{text}`")
}

/// Returns the text as a sentence with a full stop, or nothing for no text.
pub(super) fn sentence(text: &str) -> String {
    let text = text.trim();
    match text.is_empty() || text.ends_with(['.', ':', '!', '?']) {
        true => text.to_owned(),
        false => format!("{text}."),
    }
}
