//! The schema of the config file under a JSON Schema validator: it accepts every example of the
//! documents and packages, and agrees with weir on other files.

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde_json::json;

use crate::harness::TestClient;

/// Reads config files from standard input, as a JSON list of texts, and prints for each an empty
/// line if the schema accepts it, else the validator's error.
const VALIDATE: &str = r#"
import json, sys, tomllib
import jsonschema
schema = json.load(open(sys.argv[1]))
jsonschema.Draft202012Validator.check_schema(schema)
validator = jsonschema.Draft202012Validator(schema)
for text in json.load(sys.stdin):
    errors = [f"{error.json_path}: {error.message}" for error in validator.iter_errors(tomllib.loads(text))]
    print(" ".join(errors[:1]).replace("\n", " "))
"#;

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The validator's error for each file; empty if the schema accepts it.
fn schema_errors(files: &[&str]) -> Vec<String> {
    let schema = repository().join("docs/reference/config.schema.json");
    let schema = schema.to_str().expect("UTF-8");
    let client = TestClient::new("/usr/bin/python3").args(["-c", VALIDATE, schema]);
    let printed = client.with_stdin(&json!(files).to_string()).succeeds();
    let diagnostics: Vec<_> = printed.lines().map(str::to_owned).collect();
    assert_eq!(diagnostics.len(), files.len(), "{printed}");
    diagnostics
}

/// TOML blocks of a document that are config files.
fn examples(document: &str) -> impl Iterator<Item = &str> {
    let blocks = document.split("```toml\n").skip(1).filter_map(|rest| rest.split("```").next());
    blocks.filter(|block| {
        ["[disk.", "[daemon]", "[group.", "[cluster]"].iter().any(|table| block.contains(table))
    })
}

#[test]
fn examples_are_valid() {
    let mut files = Vec::new();
    for directory in ["docs", "docs/reference"] {
        for entry in fs::read_dir(repository().join(directory)).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "md") {
                let document = fs::read_to_string(&path).unwrap();
                files.extend(examples(&document).map(|example| (path.clone(), example.to_owned())));
            }
        }
    }
    assert!(files.len() > 8, "{files:?}");
    let path = repository().join("packaging/weir.toml");
    let shipped = fs::read_to_string(&path).unwrap();
    // A comment after `##` is prose; one after `# ` is a setting or prose.
    let is_setting = |line: &&str| line.starts_with("# [") || line.contains(" = ");
    let lines =
        shipped.lines().map(|line| if is_setting(&line) { line.trim_start_matches("# ") } else { line });
    files.push((path.clone(), lines.collect::<Vec<_>>().join("\n")));
    files.push((path, shipped));
    let texts: Vec<_> = files.iter().map(|(_, text)| text.as_str()).collect();
    for ((path, text), complaint) in files.iter().zip(schema_errors(&texts)) {
        assert_eq!(complaint, "", "{}:\n{text}", path.display());
    }
}

#[test]
fn schema_agrees_with_the_parser() {
    let cases = [
        ("[disk.a]\nimage = \"a\"\nread-only = true\niops-total = \"5\"\nbps-total = \"1.5G\"\n", true),
        (
            "[disk.a]\n\
             image = \"a\"\n\
             prefetch = false\n\
             detect-zeroes = \"unmap\"\n\
             l2-cache-size = \"full\"\n",
            true,
        ),
        ("[disk.a]\nimage = \"a\"\nexport = { type = \"ublk\", queues = 2 }\n", true),
        (
            "[disk.a]\nimage = \"a\"\nexport = [{ type = \"nbd\", listen = \"h:1\" }]\nallow = [\"::1\"]\n",
            true,
        ),
        ("[daemon]\npoll = false\ntls = true\nworkers = 2\nrecord = { directory = \"d\" }\n", true),
        ("[disk.a]\n", false),
        ("[disk.a]\nimage = \"a\"\ncahce = \"none\"\n", false),
        ("[disk.a]\nimage = \"a\"\ncache = \"fast\"\n", false),
        ("[disk.a]\nimage = \"a\"\ncache = true\n", false),
        ("[disk.a]\nimage = \"a\"\nread-only = 1\n", false),
        ("[disk.a]\nimage = \"a\"\niops-total = \"1K\"\n", false),
        ("[disk.a]\nimage = \"a\"\niops-total = -5\n", false),
        ("[disk.a]\nimage = \"a\"\nbps-total = \"10 MB\"\n", false),
        ("[disk.a]\nimage = \"a\"\nallow = []\n", false),
        ("[disk.a]\nimage = \"a\"\nexport = { type = \"nbd\" }\n", false),
        ("[disk.a]\nimage = \"a\"\nexport = { type = \"nbd\", listen = \"h:1\", queues = 2 }\n", false),
        ("[disk.a]\nimage = \"a\"\nexport = { type = \"iscsi\" }\n", false),
        ("[daemon]\nworker = 2\n", false),
        ("[daemon]\nrecord = \"d\"\n", false),
        ("[cluster]\nname = \"a\"\n", false),
        ("[disks.a]\nimage = \"a\"\n", false),
    ];
    let files = cases.map(|(text, _)| text);
    for ((text, is_right), complaint) in cases.into_iter().zip(schema_errors(&files)) {
        assert_eq!(complaint.is_empty(), is_right, "{complaint}\n{text}");
        let read = settings::config::parse("f", text, Path::new("/"));
        assert_eq!(read.is_ok(), is_right, "{text}: {read:?}");
    }
}
