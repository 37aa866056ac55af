//! Charts as SVG files for documents, in light colours.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::Context as _;

use super::{heat_map, lines, text::chart_title};
use crate::result::{Chart, OutputKind, write};

const MAX_NAME: usize = 64;

/// Writes each chart to a file named after its title; creates the directory if necessary.
pub(super) fn save(charts: &[Chart], directory: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(directory).with_context(|| directory.display().to_string())?;
    // All names are determined first, because equal titles are numbered.
    for (path, chart) in names(charts, directory).iter().zip(charts) {
        let drawn = match chart {
            Chart::Lines(lines) => lines::alone(lines)?,
            Chart::HeatMap(map) => heat_map::alone(map)?,
        };
        write(path, OutputKind::Chart, &drawn)?;
    }
    Ok(())
}

/// File names: titles in portable characters, numbered if equal.
fn names(charts: &[Chart], directory: &Path) -> Vec<PathBuf> {
    let mut taken: Vec<String> = Vec::new();
    for chart in charts {
        let plain = plain(chart_title(chart));
        let numbered = (2..).map(|number| format!("{plain}-{number}"));
        let name = std::iter::once(plain.clone()).chain(numbered).find(|name| !taken.contains(name));
        taken.push(name.unwrap_or(plain));
    }
    taken.iter().map(|name| directory.join(format!("{name}.svg"))).collect()
}

/// Converts a title: `Latency, by p99` becomes `latency-by-p99`.
fn plain(title: &str) -> String {
    let simplified =
        |letter: char| if letter.is_ascii_alphanumeric() { letter.to_ascii_lowercase() } else { ' ' };
    let spaced: String = title.chars().map(simplified).collect();
    let joined = spaced.split_whitespace().collect::<Vec<_>>().join("-");
    let cut: String = joined.chars().take(MAX_NAME).collect();
    if cut.is_empty() { "chart".to_owned() } else { cut }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result::{ChartSeries, Lines};

    fn chart(title: &str) -> Chart {
        let series = ChartSeries { name: "a<b".to_owned(), points: vec![(1.0, 0.0), (2.0, 1.0)] };
        Chart::Lines(Lines::distribution(title, vec![series]))
    }

    #[test]
    fn charts_are_files_named_by_title() {
        let directory = tempfile::tempdir().unwrap();
        let inner = directory.path().join("new");
        let charts = ["Share, <of> all/requests", "../../etc", "", "Share of: all requests"].map(chart);
        for _ in 0..2 {
            save(&charts, &inner).unwrap();
        }
        let mut names: Vec<_> = fs::read_dir(&inner)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert_eq!(
            names,
            ["chart.svg", "etc.svg", "share-of-all-requests-2.svg", "share-of-all-requests.svg"]
        );
        let svg = fs::read_to_string(inner.join("share-of-all-requests.svg")).unwrap();
        assert!(
            svg.contains("<title>Share, &lt;of&gt; all/requests</title>") && svg.contains(">a&lt;b</text>")
        );
        assert_eq!(svg.matches("<svg").count(), svg.matches("</svg>").count(), "{svg}");
        assert!(svg.contains("fill=\"#FFFFFF\"") && !svg.contains("<script"));
        fs::write(inner.join("etc.svg"), "<svg mine").unwrap();
        assert!(save(&charts, &inner).is_err());
    }
}
