//! Detects the numeric columns of a table, which are right-aligned.

use console::table::ColumnAlignment;

use crate::result::ResultTable;

/// Maximum length of a unit: more letters after a number are words.
const UNIT: usize = 6;

/// Alignment of each column. The first names the rows and is never numeric.
pub(super) fn sides(table: &ResultTable) -> Vec<ColumnAlignment> {
    let side = |column: usize| {
        let cells = || table.rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.trim());
        let holds = column > 0
            && cells().any(is_number)
            && cells().all(|cell| is_number(cell) || is_placeholder(cell));
        if holds { ColumnAlignment::Right } else { ColumnAlignment::Left }
    };
    (0..table.columns.len()).map(side).collect()
}

fn is_placeholder(cell: &str) -> bool {
    matches!(cell, "" | "-" | "–" | "—" | "exact" | "one run")
}

/// True for `12`, `-4.2%`, `85us`, `1.2 GiB/s`, `1.2K [1.1K, 1.3K]`, `9K … 10K`; not for `4 KiB
/// random read`.
fn is_number(cell: &str) -> bool {
    let unsigned = cell.trim_start_matches(['+', '-', '−', '±', '<', '>', '≤', '≥', '~', ' ']);
    // An interval after the value does not change its kind.
    let value = unsigned.split(['[', '(', '…']).next().unwrap_or_default();
    let value = value.split(" to ").next().unwrap_or_default().trim_end();
    let suffix = value.trim_start_matches(|letter: char| letter.is_ascii_digit() || ".,".contains(letter));
    unsigned.starts_with(|letter: char| letter.is_ascii_digit())
        && suffix.chars().count() <= UNIT
        && !suffix.trim().contains([' ', '-', '='])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_distinguished_from_words() {
        for number in [
            "0",
            "-4.2%",
            "85us",
            "1.2 GiB/s",
            "1.2K [1.1K, 1.3K]",
            "-1% … +2%",
            "9.9K to 10K",
            "< 1%",
            "12,345",
            "1.02×",
        ] {
            assert!(is_number(number), "{number}");
        }
        for text in ["", "none", "4 KiB random read", "2-way", "64K cluster", "v1.2", "-"] {
            assert!(!is_number(text), "{text}");
        }
    }

    #[test]
    fn number_columns_are_right_aligned() {
        let row = |cells: [&str; 4]| cells.map(str::to_owned).to_vec();
        let table = ResultTable {
            columns: row(["size", "IOPS", "mode", "nothing"]),
            rows: vec![row(["4", "12.3K", "none", "-"]), row(["8", "-", "2", ""]), vec!["16".to_owned()]],
            ..ResultTable::default()
        };
        assert_eq!(
            sides(&table),
            [ColumnAlignment::Left, ColumnAlignment::Right, ColumnAlignment::Left, ColumnAlignment::Left]
        );
    }
}
