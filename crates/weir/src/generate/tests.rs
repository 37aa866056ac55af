//! Checks that the files in the source tree match the tables of keys.

use std::{fs, path::PathBuf};

use serde_json::Value;

use super::{schema, tables};

/// Command that updates the files.
const REMEDY: &str = "run `make reference`";

fn repository() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn reference(file: &str) -> String {
    fs::read_to_string(repository().join("docs/reference").join(file)).expect(REMEDY)
}

#[test]
fn the_reference_has_the_tables_of_keys() {
    let document = reference(tables::DOCUMENT);
    assert!(tables::updated(&document).unwrap() == document, "{}: {REMEDY}", tables::DOCUMENT);
    for section in super::keys::sections() {
        for row in section.rows {
            assert!(document.contains(&format!("| `{}` |", row.name)), "{}: {}", section.name, row.name);
        }
    }
    assert_eq!(
        tables::updated("a <!-- keys: x -->\n").unwrap_err().to_string(),
        "<!-- keys: x: no <!-- end --> below"
    );
}

#[test]
fn schema_file_matches_the_tables() {
    let stored: Value = serde_json::from_str(&reference(schema::FILE)).unwrap();
    assert!(stored == schema::schema(), "{}: {REMEDY}", schema::FILE);
}
