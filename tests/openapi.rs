//! The API of `--http` against its description: schemathesis sends valid and invalid requests
//! according to `openapi.json`, and compares each response with it.
//!
//! It fails on an undocumented status, a response that violates its schema, an invalid body that is
//! accepted, and a 5xx other than 503. `WEIR_SCHEMATHESIS_SECONDS` repeats for that time, with a
//! new seed each time.

use std::{env, fs, os::unix::fs::PermissionsExt as _};

use serde_json::Value;

use crate::harness::{
    Scratch, Serve, TestClient,
    operator::{run_ok, socket},
    text,
};

const TOKEN: &str = "0123456789abcdef0123456789abcdef";
/// Maximum number of requests per operation and phase: about a minute on an idle host.
const EXAMPLES: &str = "60";
/// Checks that are excluded. A body that the schema allows may be rejected, because the schema
/// lacks the rules between limits (a total beside a read limit). `http.rs` tests authentication:
/// ten wrong tokens would throttle the client for the rest of the run.
const EXCLUDED_CHECKS: &str = "positive_data_acceptance,ignored_auth";
/// Existing names: an unknown name yields 404 whatever the body is.
const NAMES: &str = r#"
[[operations]]
include-path-regex = "^/api/v1/disks/"
parameters = { name = "db" }

[[operations]]
include-path-regex = "^/api/v1/groups/"
parameters = { name = "gold" }
"#;

/// Starts a daemon with a disk in a group; returns it and the address of its page.
fn serve(scratch: &Scratch) -> (crate::harness::Weir, String) {
    let token = scratch.file("token", format!("{TOKEN}\n"));
    fs::set_permissions(&token, fs::Permissions::from_mode(0o600)).unwrap();
    let image = scratch.filled("copied.raw", 1 << 20);
    let config = format!(
        "[group.gold]\niops-total = 1000\n[disk.db]\nimage = \"memory:16M\"\ngroup = \"gold\"\n\
         [disk.copied]\nimage = {:?}\nformat = \"raw\"\n",
        text(&image)
    );
    let config = scratch.file("weir.toml", config);
    let root = scratch.path("");
    let weir = Serve::new(scratch)
        .args(["--config", text(&config), "--http", "127.0.0.1:0", "--http-token-file", text(&token)])
        .args(["--image-root", text(&root), "--qmp", &socket(scratch)])
        .start();
    // A job that does not end meanwhile. Its disk has no clients, so previews do not replay it.
    let target = scratch.path("backup.raw");
    run_ok(scratch, &["backup", "copied", "--to", text(&target), "--detach", "--bps-total", "1"]);
    let line = weir.wait_for_log("page at=");
    let address = line.split_once("at=").unwrap().1.split(' ').next().unwrap().to_owned();
    (weir, address)
}

fn schemathesis(scratch: &Scratch, address: &str, config: &str, seed: &str) -> TestClient {
    let config = scratch.file("schemathesis.toml", config);
    let client = TestClient::new("schemathesis").inside(&scratch.path("")).args([
        "--config-file",
        text(&config),
        "--no-color",
        "run",
        &format!("http://{address}/api/v1/openapi.json"),
    ]);
    // The stream of events is endless.
    client
        .args(["--exclude-path", "/api/v1/stream", "--checks", "all", "--exclude-checks", EXCLUDED_CHECKS])
        .args(["-H", &format!("Authorization: Bearer {TOKEN}"), "--warnings", "off", "--seed", seed])
}

#[test]
fn responses_match_openapi() {
    let scratch = Scratch::new();
    let (weir, address) = serve(&scratch);
    match env::var("WEIR_SCHEMATHESIS_SECONDS") {
        Ok(seconds) => {
            let seed = std::process::id().to_string();
            schemathesis(&scratch, &address, NAMES, &seed).args(["--max-time", &seconds]).succeeds();
        }
        Err(_) => {
            // The second run has random names.
            for (config, examples) in [(NAMES, EXAMPLES), ("", "10")] {
                schemathesis(&scratch, &address, config, "1")
                    .args(["--max-examples", examples, "--generation-deterministic"])
                    .succeeds();
            }
        }
    }
    weir.stop();
}

#[test]
fn non_numeric_text_violates_the_schema() {
    let described: Value = serde_json::from_str(include_str!("../docs/reference/openapi.json")).unwrap();
    let schemas = &described["components"]["schemas"];
    for (name, schema) in schemas["Changes"]["properties"].as_object().unwrap() {
        let kind = schema["$ref"].as_str().unwrap().rsplit('/').next().unwrap();
        let forms = schemas[kind]["oneOf"].as_array().unwrap();
        for form in forms.iter().filter(|form| form["type"] == "string") {
            let pattern =
                form["pattern"].as_str().unwrap_or_else(|| panic!("{name}: the schema permits any text"));
            assert!(pattern.starts_with('^') && pattern.ends_with('$'), "{name}: {pattern}");
        }
        assert!(forms.iter().all(|form| form["type"] != "integer" || form["maximum"].is_u64()), "{name}");
    }
}

#[test]
fn every_operation_has_an_id_and_states_whether_it_needs_the_token() {
    let described: Value = serde_json::from_str(include_str!("../docs/reference/openapi.json")).unwrap();
    let mut ids = Vec::new();
    for (path, item) in described["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap().iter().filter(|(key, _)| *key != "parameters") {
            ids.push(operation["operationId"].as_str().unwrap_or_else(|| panic!("{method} {path}")));
            let security = operation["security"].as_array().unwrap_or_else(|| panic!("{method} {path}"));
            assert_eq!(security.is_empty(), method == "get", "{method} {path}");
        }
    }
    let count = ids.len();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), count, "two operations have the same id");
}
