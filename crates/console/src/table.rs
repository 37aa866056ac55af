//! Columns of text for a terminal or a pipe. Each is as wide as its content; two spaces separate
//! them.
//!
//! Never prints a control character: cells may hold names from a client's configuration.

use reactor::sanitize::sanitize;

/// Alignment of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ColumnAlignment {
    /// For text.
    Left,
    /// For numbers.
    Right,
}

/// Columns for text, followed by columns for numbers.
pub fn columns<'a>(texts: &[&'a str], numbers: &[&'a str]) -> Vec<(&'a str, ColumnAlignment)> {
    let text_columns = texts.iter().map(|&name| (name, ColumnAlignment::Left));
    text_columns.chain(numbers.iter().map(|&number| (number, ColumnAlignment::Right))).collect()
}

/// Rows under a heading.
#[derive(Debug)]
pub struct TextTable {
    columns: Vec<(String, ColumnAlignment)>,
    rows: Vec<Vec<String>>,
}

impl TextTable {
    /// Table without rows.
    pub fn new<'a>(columns: impl IntoIterator<Item = (&'a str, ColumnAlignment)>) -> Self {
        let columns = columns.into_iter().map(|(name, side)| (sanitize(name), side));
        Self { columns: columns.collect(), rows: Vec::new() }
    }

    /// Adds a row with one cell for each column.
    pub fn row(&mut self, cells: Vec<String>) {
        debug_assert_eq!(cells.len(), self.columns.len(), "a cell for each column");
        self.rows.push(cells.iter().map(|cell| sanitize(cell)).collect());
    }

    /// Text of the table, each line with a newline; empty if there are no rows. With `bold` the
    /// heading is bold.
    pub fn render(&self, bold: bool) -> String {
        if self.rows.is_empty() {
            return String::new();
        }
        let widths: Vec<usize> = (0..self.columns.len()).map(|column| self.width(column)).collect();
        let heading: Vec<String> = self.columns.iter().map(|(name, _)| name.clone()).collect();
        let heading = self.line(&heading, &widths);
        let mut text = if bold { format!("\x1b[1m{heading}\x1b[0m\n") } else { heading + "\n" };
        for row in &self.rows {
            text += &self.line(row, &widths);
            text.push('\n');
        }
        text
    }

    fn line(&self, cells: &[String], widths: &[usize]) -> String {
        let mut line = String::new();
        for (index, cell) in cells.iter().enumerate() {
            let padding = " ".repeat(widths[index].saturating_sub(cell.chars().count()));
            if index > 0 {
                line += "  ";
            }
            match self.columns[index].1 {
                ColumnAlignment::Left => line.extend([cell.as_str(), &padding]),
                ColumnAlignment::Right => line.extend([&padding, cell.as_str()]),
            }
        }
        // The last column of a row may be padded or empty.
        line.truncate(line.trim_end().len());
        line
    }

    fn width(&self, column: usize) -> usize {
        let cells = self.rows.iter().map(|row| row[column].chars().count());
        cells.chain([self.columns[column].0.chars().count()]).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_content() {
        let mut table = TextTable::new([("DISK", ColumnAlignment::Left), ("IOPS", ColumnAlignment::Right)]);
        assert_eq!(table.render(false), "");
        table.row(vec!["a\x1b[2J".to_owned(), "1".to_owned()]);
        table.row(vec!["vm×1".to_owned(), "10000".to_owned()]);
        assert_eq!(table.render(false), "DISK    IOPS\na?[2J      1\nvm×1   10000\n");
        assert!(table.render(true).starts_with("\x1b[1mDISK    IOPS\x1b[0m\n"));
    }
}
